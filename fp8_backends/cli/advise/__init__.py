"""`fp8-backends advise`: the mildest change of a recipe that halves the error of its gradients."""
