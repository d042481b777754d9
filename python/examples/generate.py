"""A packed cache in ``model.generate``. Needs PyTorch and transformers; the model is small and has random weights.

    python examples/generate.py [recipe]
"""

import sys

import torch
import transformers

import kvpack.hf


def main(recipe="kivi:4+window=128"):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
                                      num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device).eval()
    prompt = torch.randint(3, 1000, (2, 500), device=device)

    kvpack.hf.enable(model, recipe)
    # Parts of 256 tokens: the f16 form of a part lives as long as its forward pass.
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False,
                            pad_token_id=0, prefill_chunk_size=256, return_dict_in_generate=True)
    past = getattr(output, "past_key_values", None) or output.cache
    memory = past.memory()
    print(f"{output.sequences.shape[1]} tokens, {memory['bits_per_element']:.2f} bits an element, "
          f"{memory['in_use_bytes'] / 2**20:.2f} MiB on {device}")


if __name__ == "__main__":
    main(*sys.argv[1:])
