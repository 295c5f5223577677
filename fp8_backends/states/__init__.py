"""How weights, gradients and optimizer states are stored: MS-AMP's levels O1, O2 and O3.

`levels.py` turns the weights of converted layers into `ScaledTensor`s and their gradients into E4M3; `adamw.py` is the
optimizer that trains them, with low-precision states. Neither knows who multiplies.
"""
