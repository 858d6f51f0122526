"""torchtitan's own trainer on a CPU, with the loader of docs/torchtitan.md: PAGE SET FOLDER STEPS LOAD_STEP. Prints JSON.

torchtitan wants an accelerator: a stand-in for the memory figures of one is given to it, and for the one call that has no
backward on a CPU, FlexAttention, plain attention under the same mask.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types

import torch
import torch._utils


class Device(types.ModuleType):
    """torch.cpu with what torchtitan asks of an accelerator."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def set_device(self, device):
        pass

    def current_device(self):
        return 0

    def get_device_name(self, device):
        return "cpu"

    def get_device_properties(self, device):
        return types.SimpleNamespace(total_memory=1 << 34)

    def memory_stats(self, device):
        return {}

    def reset_peak_memory_stats(self):
        pass

    def empty_cache(self):
        pass


def main(page: str, path: str, folder: str, steps: int, load_step: int) -> None:
    theirs = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: Device("cpu") if kind == "cpu" else theirs(kind)
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from torch.nn.attention.flex_attention import create_mask
    from torchtitan.models.common.attention import FlexAttention

    masks = []

    def plain(q, k, v, *, block_mask, scale, enable_gqa, **_):
        seen = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
        masks.append(seen)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa), None

    FlexAttention._compiled_flex_attn = staticmethod(plain)
    config = runpy.run_path(page, {"path": path})["packed_debugmodel"]()
    training, checkpoint = config.training, config.checkpoint
    training.local_batch_size, training.seq_len, training.steps = 2, 128, steps
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    config.validator.enable, config.activation_checkpoint = False, None
    config.dump_folder, config.hf_assets_path = folder, folder
    config.tokenizer = types.SimpleNamespace(build=lambda **_: None)
    checkpoint.enable, checkpoint.interval, checkpoint.load_step = True, 3, load_step
    trainer = config.build()
    losses, labels, log, step = [], [], trainer.metrics_processor.log, trainer.forward_backward_step

    def logged(number, loss, *others, **named):
        losses.append(float(loss))
        log(number, loss, *others, **named)

    def counted(**given):
        labels.append(int(given["global_valid_tokens"]))
        return step(**given)

    trainer.metrics_processor.log, trainer.forward_backward_step = logged, counted
    trainer.train()
    trainer.close()
    print(json.dumps({"losses": losses, "labels": labels, "mask": masks[0].flatten().int().tolist()}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
