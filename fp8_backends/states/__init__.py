"""How weights, gradients and optimizer states are stored: MS-AMP's levels O1, O2 and O3.

`levels.py` turns the weights of converted layers into `ScaledTensor`s and their gradients into E4M3. `adamw.py` is the
optimizer that trains them, with low-precision states; `sharding.py` has what its ranks agree on, and `checkpoint.py`
what it saves and loads. None of them knows who multiplies.
"""
