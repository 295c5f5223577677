"""Train with Lightning's Trainer and the FP8 precision plugin. Lightning's checkpoints include the
scaling states.

python lightning_fit.py --backend native:delayed
"""

import argparse
import logging

import lightning
import torch
from fp8_backends.lightning import FP8Precision
from torch import nn


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch: tuple[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        loss = nn.functional.mse_loss(self.layers(x).float(), x)
        if index % 8 == 0:
            print(f"step {self.global_step}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main(backend: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16) @ torch.randn(16, 64))
    trainer = lightning.Trainer(
        max_epochs=3,
        plugins=[FP8Precision(backend)],
        gradient_clip_val=10.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Autoencoder(), torch.utils.data.DataLoader(data, batch_size=4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native:delayed")
    main(parser.parse_args().backend)
