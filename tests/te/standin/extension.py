"""The module `transformer_engine_torch`: enums with the values of the compiled one, and its
functions by name."""

from __future__ import annotations

import enum
import functools
from types import ModuleType

import torch

from . import blocks, casts, delayed, norms, products


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FP8TensorMeta:
    """A record of the compiled module: scale, scale_inv and amax_history."""

    scale = scale_inv = amax_history = None


def _enum(name: str, members: str) -> type[enum.IntEnum]:
    """Members "A=0 B=1" or, numbered from 0, "A B"."""
    pairs = [member.partition("=") for member in members.split()]
    return enum.IntEnum(
        name, {name: int(value or place) for place, (name, _, value) in enumerate(pairs)}
    )


_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD "
    "THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD "
    "Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD "
    "BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)
ENUMS = {
    "FP8FwdTensors": " ".join(
        f"GEMM{i}_{role}" for i in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")
    ),
    "FP8BwdTensors": " ".join(
        f"{role}{i}" for i in (1, 2, 3) for role in ("GRAD_OUTPUT", "GRAD_INPUT")
    ),
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": (
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
        "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
        "EXTERNAL_BULK_OVERLAP_AG"
    ),
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEScalingMode": (
        "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
        "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING=100"
    ),
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen=1 NVTE_FP8=2 NVTE_No_Backend=-1",
    "NVTE_Mask_Type": (
        "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
    ),
    "NVTE_QKV_Format": (
        "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD "
        "NVTE_THD_2SBHD NVTE_BHSD NVTE_QKV_Format_NOT_SET"
    ),
    "NVTE_QKV_Layout": " ".join(f"NVTE_{layout}" for layout in _LAYOUTS.split()),
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
}
CLASSES = (
    "CommOverlap",
    "CommOverlapBase",
    "CommOverlapCore",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "CommOverlapP2PBase",
)
FUNCTIONS = (
    casts.quantize,
    casts.dequantize,
    casts.bgrad_quantize,
    casts.create_empty_quantized_tensor,
    casts.fp8_transpose,
    casts.compute_amax,
    casts.split_quantize,
    casts.fused_multi_row_padding,
    casts.fused_multi_row_unpadding,
    casts.swap_first_dims,
    blocks.swizzle_scales_for_gemm_,
    delayed.fused_amax_and_scale_update_after_reduction,
    products.generic_gemm,
    products.te_general_grouped_gemm,
    norms.layernorm_fwd,
    norms.layernorm_bwd,
    norms.rmsnorm_fwd,
    norms.rmsnorm_bwd,
    norms.rmsnorm_bwd_add,
)
VALUES = {
    "get_cublasLt_version": lambda: 130100,
    "get_cudnn_version": lambda: 91900,
    "get_num_cublas_streams": lambda: 4,
    "ubuf_built_with_mpi": lambda: False,
    "nvte_built_with_cublasmp": lambda: False,
    "device_supports_multicast": lambda device=-1: False,
}


def module() -> ModuleType:
    """The stand-in, under the compiled module's name."""
    made = ModuleType(
        "transformer_engine_torch",
        "A stand-in for TransformerEngine's compiled module, on the CPU.",
    )
    made.DType, made.FP8TensorMeta = DType, FP8TensorMeta
    for name, members in ENUMS.items():
        setattr(made, name, _enum(name, members))
    for name in CLASSES:
        setattr(made, name, type(name, (), {"__init__": _not_emulated(name)}))
    for function in FUNCTIONS:
        setattr(made, function.__name__, _as_kernel(function))
    vars(made).update(VALUES)
    made.__getattr__ = _missing
    return made


def _as_kernel(function):
    """Disable autocast, which would round FP32 operands of a product to bf16, and autograd, as in
    kernels."""

    @functools.wraps(function)
    def kernel(*args, **kwargs):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return kernel


def _missing(name: str):
    if name.startswith("__") or name in ("flash_attention", "get_attention_backend"):
        # the last two: names that TransformerEngine looks up and can do without
        raise AttributeError(name)
    return _not_emulated(name)


def _not_emulated(name: str):
    def call(*args, **kwargs):
        raise NotImplementedError(
            f"transformer_engine_torch.{name}: the stand-in does not emulate it"
        )

    call.__name__ = name
    return call
