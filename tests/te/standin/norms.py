"""LayerNorm and RMSNorm forward and backward, in FP32 whatever the dtypes:
transformer_engine/common/normalization."""

from __future__ import annotations

import torch

from .casts import DTYPES, create_empty_quantized_tensor, quantize


def layernorm_fwd(
    input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
) -> list:
    """Return [y, mean, rsigma]: y [rows, n] of `otype`, or quantized with a quantizer; mean and
    rsigma FP32 [rows]."""
    x = input.float()
    mean = x.mean(-1, keepdim=True)
    rsigma = (x - mean).square().mean(-1, keepdim=True).add(eps).rsqrt()
    y = (x - mean) * rsigma * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.float()
    return [_output(y, ln_out, quantizer, otype), mean.flatten(), rsigma.flatten()]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma) -> list:
    """[dx, dgamma, dbeta] in the dtypes of x and gamma."""
    inverse = rsigma.unsqueeze(-1)
    normed = (x.float() - mu.unsqueeze(-1)) * inverse
    dy = dz.float() * _gamma(gamma, zero_centered_gamma)
    dx = (dy - dy.mean(-1, keepdim=True) - normed * (dy * normed).mean(-1, keepdim=True)) * inverse
    dgamma = (dz.float() * normed).sum(0)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype), dz.float().sum(0).to(gamma.dtype)]


def rmsnorm_fwd(
    input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
) -> list:
    """[y, None, rsigma], as `layernorm_fwd`."""
    x = input.float()
    rsigma = x.square().mean(-1, keepdim=True).add(eps).rsqrt()
    y = x * rsigma * _gamma(weight, zero_centered_gamma)
    return [_output(y, ln_out, quantizer, otype), None, rsigma.flatten()]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma) -> list:
    """[dx, dgamma] in the dtypes of x and gamma."""
    return _rmsnorm_backward(dz, x, 0.0, rsigma, gamma, zero_centered_gamma)


def rmsnorm_bwd_add(dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma) -> list:
    """[dx + add, dgamma]."""
    return _rmsnorm_backward(dz, x, add.float(), rsigma, gamma, zero_centered_gamma)


def _rmsnorm_backward(dz, x, add, rsigma, gamma, zero_centered_gamma: bool) -> list:
    inverse = rsigma.unsqueeze(-1)
    normed = x.float() * inverse
    dy = dz.float() * _gamma(gamma, zero_centered_gamma)
    dx = (dy - normed * (dy * normed).mean(-1, keepdim=True)) * inverse + add
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)]


def _gamma(weight: torch.Tensor, zero_centered_gamma: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered_gamma else weight.float()


def _output(y: torch.Tensor, out, quantizer, otype):
    """Take delayed scaling's codes and amax from the FP32 values; all others first round to
    `otype`."""
    dtype = DTYPES[int(otype)]
    if type(quantizer).__name__ == "Float8Quantizer":
        made = (
            create_empty_quantized_tensor(quantizer, y.shape, dtype, y.device, False)
            if out is None
            else out
        )
        return quantize(y, quantizer, made)
    y = y.to(dtype)
    if quantizer is not None:
        return quantize(y, quantizer, out)
    return y if out is None else out.copy_(y)
