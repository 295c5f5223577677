"""Storage of weights, gradients and optimizer states: MS-AMP's levels O1, O2 and O3, and O4.

`levels.py` turns the weights of converted layers into `ScaledTensor`s and their gradients into
E4M3. `optimizers.py` converts stock optimizers to `scaled_states.ScaledStates`, with steps in
`adamw.py` and `stock_steps.py`. `sharding.py` lets ranks agree, and `checkpoint.py` saves and
loads. No file here knows how products are computed.
"""
