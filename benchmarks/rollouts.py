"""Compare ways to roll out a policy in FP8, by the policy gap and by the rewards of TRL's GRPO over
seeds.

    codes       the trainer multiplies in FP8 by blocks, and the engine multiplies its codes (`rollout_weights`)
    blockwise   the same trainer; the engine gets plain weights, and quantizes them by blocks itself
    bf16        the trainer multiplies in bf16; the engine as before
    dynamic     both have one scale for a tensor of activations: it depends on the other tokens of a batch

The engine is a second model in this process with a cache of keys and values, loaded before each
generation. A tiny Llama learns from nothing to answer with even words, 32 answers of 8 words a
step.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable

import datasets
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from measuring import options, write_json
from tables import printed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import fp8_backends
from fp8_backends.compute.hardware import cpu_bf16
from fp8_backends.tensors.block_codes import BlockCodes
from fp8_backends.tools.compare.summary import t_quantile
from fp8_backends.trl import PolicyGapCallback

SETTINGS = {
    "codes": ("native:blockwise", "blockwise"),
    "blockwise": ("native:blockwise", "blockwise"),
    "bf16": (None, "blockwise"),
    "dynamic": ("native:dynamic", "dynamic"),
}
"""Backend of the trainer (None: bf16), and scaling of the engine."""
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PROMPT, ANSWER, GROUP, BATCH = 4, 8, 8, 32
FIGURES = ("mean", "largest", "k3", "mult_prob_error", "effective_share")


class Engine:
    """Generate with FP8 products."""

    def __init__(self, model: LlamaForCausalLM, scaling: str, multiplies_codes: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        recipe = fp8_backends.NativeRecipeKwargs(
            scaling=scaling, fp8_params=multiplies_codes, use_autocast_during_eval=True
        )
        fp8_backends.prepare(self.model, None, recipe)
        self.model.generation_config.eos_token_id = None  # answers have one length

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        codes = {}
        for name, tensor in weights:
            if tensor.dtype == torch.float8_e4m3fn:
                codes[name] = tensor
            elif name.endswith("_scale_inv"):
                weight = self.model.get_parameter(name.removesuffix("_scale_inv"))
                weight.copy_(
                    BlockCodes((codes[name.removesuffix("_scale_inv")], tensor), weight.dtype)
                )
            else:
                self.model.get_parameter(name).copy_(tensor)

    @torch.no_grad()
    def generate(self, ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return sampled answers, and the logprob of each of their words."""
        prompts, options = (
            torch.tensor(ids),
            {"max_new_tokens": ANSWER, "do_sample": True, "top_k": 0},
        )
        returned = {"return_dict_in_generate": True, "output_scores": True}
        with torch.autocast("cpu", torch.bfloat16, enabled=cpu_bf16()):
            out = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), **options, **returned
            )
        answers = out.sequences[:, PROMPT:]
        logprobs = (
            torch.stack(out.scores, dim=1).float().log_softmax(-1).gather(-1, answers.unsqueeze(-1))
        )
        return answers.tolist(), logprobs.squeeze(-1).tolist()


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    return [sum(word % 2 == 0 for word in words) / len(words) for words in completion_ids]


def run(setting: str, seed: int, steps: int, lr: float) -> dict:
    """Train, and return the mean rewards of each tenth of the steps, and the policy gaps."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    backend, scaling = SETTINGS[setting]
    os.environ |= {
        "ACCELERATE_MIXED_PRECISION": "fp8" if backend else "bf16",
        "ACCELERATE_FP8_BACKEND": backend or "",
    }
    if not backend:
        del os.environ["ACCELERATE_FP8_BACKEND"]
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **SIZES)
    )
    engine = Engine(model, scaling, multiplies_codes=setting == "codes")
    weights = []

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict:
        if setting != "codes":
            weights[:] = [list(trainer.model.named_parameters())]
        elif not weights:
            weights.append(fp8_backends.checkpoints.rollout_weights(trainer.model))
        engine.load_weights(weights[0])
        ids = trainer.processing_class(prompts)["input_ids"]
        answers, logprobs = engine.generate(ids)
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": logprobs}

    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(WORDS[2:], k=PROMPT)) for _ in range(steps * BATCH // GROUP)]
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            num_generations=GROUP,
            max_completion_length=ANSWER,
            learning_rate=lr,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            # without bf16 products, PyTorch's bf16 rounds by the shape of a batch: 1e-3 of a gap
            bf16=cpu_bf16() or not backend,
            seed=seed,
        )
        data = Dataset.from_dict({"prompt": prompts})
        trainer = GRPOTrainer(
            model, reward, args, data, processing_class=tokenizer(), rollout_func=rollout
        )
        watching = PolicyGapCallback(trainer)
        trainer.add_callback(watching)
        trainer.train()
    gaps = {name: statistics.fmean(getattr(gap, name) for gap in watching.gaps) for name in FIGURES}
    gaps["largest"] = max(gap.largest for gap in watching.gaps)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    tenth = max(steps // 10, 1)
    means = [statistics.fmean(rewards[at : at + tenth]) for at in range(0, len(rewards), tenth)]
    return {
        "setting": setting,
        "seed": seed,
        "gap": gaps,
        "rewards": [round(each, 4) for each in means],
    }


def interval(values: list[float]) -> dict[str, float]:
    """Return the mean with half of its 95 % interval."""
    half = (
        t_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        if len(values) > 1
        else None
    )
    return {"mean": statistics.fmean(values), "half_width": half}


def results(runs: list[dict]) -> list[dict]:
    """Return by setting the mean gap over the seeds, and the rewards of the tenths of the steps
    with intervals."""
    found = []
    for setting in dict.fromkeys(each["setting"] for each in runs):
        own = [each for each in runs if each["setting"] == setting]
        gap = {name: statistics.fmean(each["gap"][name] for each in own) for name in FIGURES}
        gap["largest"] = max(each["gap"]["largest"] for each in own)
        curve = [
            interval(list(rewards))
            for rewards in zip(*(each["rewards"] for each in own), strict=True)
        ]
        found.append({"setting": setting, "seeds": len(own), "gap": gap, "curve": curve})
    return found


def main() -> None:
    arguments = options(__doc__, settings=",".join(SETTINGS), seeds=5, steps=100, lr=3e-4)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    datasets.disable_progress_bars()
    runs, begun = [], time.perf_counter()
    for seed in range(arguments.seeds):
        runs += [
            run(each, seed, arguments.steps, arguments.lr) for each in arguments.settings.split(",")
        ]
    minutes = (time.perf_counter() - begun) / 60
    question = "policy gap and rewards of GRPO by the precision of rollouts"
    record = write_json(arguments, question, minutes=minutes, results=results(runs), runs=runs)
    printed("rollouts", record)


if __name__ == "__main__":
    main()
