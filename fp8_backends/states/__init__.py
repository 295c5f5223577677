"""How weights, gradients and optimizer states are stored: MS-AMP's levels O1, O2 and O3, and O4.

`levels.py` turns the weights of converted layers into `ScaledTensor`s and their gradients into E4M3. `scaled_states.py`
is an optimizer with low-precision states, whatever its formula; `adamw.py` is Adam, and `optimizers.py` knows them all
and converts. `sharding.py` has what the ranks of an optimizer agree on, and `checkpoint.py` what it saves and loads.
None of them knows who multiplies.
"""
