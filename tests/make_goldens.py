"""Write tests/goldens/*.npz with transformers' own logits: python tests/make_goldens.py (needs torch)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import golden_models
import numpy as np
import torch
import transformers


def main() -> None:
    for name in golden_models.SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            path = golden_models.write(name, Path(folder))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
        tokens_BT = golden_models.tokens(name)
        with torch.no_grad():
            logits_BTV = model(torch.from_numpy(tokens_BT).long()).logits.numpy()
        np.savez_compressed(golden_models.GOLDENS / f"{name}.npz", tokens_BT=tokens_BT, logits_BTV=logits_BTV)
        print(name, logits_BTV.shape, f"largest logit {abs(logits_BTV).max():.2f}")


if __name__ == "__main__":
    main()
