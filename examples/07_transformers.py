"""A Mixtral of transformers with its experts spread over two ranks gives the same logits.

python examples/07_transformers.py
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moe_engine.emulation import RankPool
from moe_engine.integrations.transformers import shard_experts

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # all ranks make the same model
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS)).to(device)
    input_ids = torch.randint(
        0, 64, (1, 6 + group.rank()), device=device
    )  # each rank its own batch
    with torch.no_grad():
        want = model(input_ids).logits
        buffer = shard_experts(model, group)
        have = model(input_ids).logits
    buffer.check()
    experts = model.model.layers[0].mlp.experts
    return float((have - want).abs().max() / want.abs().max()), len(experts.gate_up_proj)


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        results = pool.run(run)
    assert max(error for error, _ in results) < 1e-4
    print(f"Each rank keeps {results[0][1]} of 4 experts, and the logits are right.")
