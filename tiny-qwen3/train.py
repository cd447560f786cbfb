"""Train the bundled model: a 3.8M-parameter Qwen3 on the 1.1 MB "tiny Shakespeare" text (public domain).

    python tiny-qwen3/train.py tinyshakespeare.txt

The last tenth of the text is held out: it becomes eval.txt and is never trained on, nor does the tokenizer see it.
calib.txt is the first 300 kB of the training part. One pass writes an ordinary Hugging Face folder beside this file.
A text this small is soon memorized; three things hold that off: dropout on each block's output, weight decay, and
BPE dropout (each epoch splits the text into tokens anew, at random). The checkpoint is the last one: none is selected.
"""
import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB, CONTEXT, EOS, SEED = 1024, 2048, "<|endoftext|>", 20260938
STAGES = [(0.85, 256, 32), (0.15, CONTEXT, 4)]      # (share of the steps, sequence length, sequences a step)


def train_tokenizer(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, dropout: float | None) -> torch.Tensor:
    tokenizer.model.dropout = dropout
    lines = tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
    tokenizer.model.dropout = None
    return torch.tensor([i for line in lines for i in line.ids])


@torch.no_grad()
def bits_per_byte(model, ids: torch.Tensor, n_bytes: int) -> float:
    """Code length of `ids` in windows of CONTEXT tokens that start afresh, in bits per byte of text."""
    model.eval()
    nats = sum(F.cross_entropy(model(w[None, :-1]).logits[0].float(), w[1:], reduction="sum").item()
               for w in (ids[i:i + CONTEXT + 1] for i in range(0, len(ids) - 1, CONTEXT)))
    model.train()
    return nats / math.log(2) / n_bytes


def add_dropout(model, p: float) -> list:
    drop = lambda module, args, out: ((F.dropout(out[0], p, module.training), *out[1:]) if isinstance(out, tuple)
                                      else F.dropout(out, p, module.training))
    blocks = [b for layer in model.model.layers for b in (layer.self_attn, layer.mlp)] + [model.model.embed_tokens]
    return [b.register_forward_hook(drop) for b in blocks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--bpe-dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    text = args.text.read_text()
    cut = text.rindex("\n\n", 0, int(0.9 * len(text))) + 2
    train_text, eval_text = text[:cut], text[cut:]
    tokenizer = train_tokenizer(train_text)
    held_out = encode(tokenizer, eval_text, None)

    config = Qwen3Config(
        vocab_size=len(tokenizer.get_vocab()), hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=0)
    model = Qwen3ForCausalLM(config).train()
    hooks = add_dropout(model, args.dropout)
    decay = [p for p in model.parameters() if p.dim() == 2]
    other = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.2}, {"params": other, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.98))
    warmup = 200
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(
        (i + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1, i / args.steps)))))

    start, step, seen, ids = time.time(), 0, 0, None
    for share, length, batch in STAGES:
        for _ in range(round(share * args.steps)):
            if ids is None or seen >= len(ids):
                ids, seen = encode(tokenizer, train_text, args.bpe_dropout), 0
            rows = torch.randint(len(ids) - length - 1, (batch, 1)) + torch.arange(length + 1)
            x = ids[rows]
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step, seen = step + 1, seen + batch * length
            if step % 250 == 0 or step == args.steps:
                bpb = bits_per_byte(model, held_out, len(eval_text.encode()))
                print(f"step {step}  train {loss.item():.3f} nats/token  held out {bpb:.3f} bits/byte  "
                      f"{time.time() - start:.0f} s", flush=True)

    for hook in hooks:
        hook.remove()
    model.to(torch.bfloat16)
    bpb = bits_per_byte(model, held_out, len(eval_text.encode()))
    model.save_pretrained(args.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, model_max_length=CONTEXT,
                            clean_up_tokenization_spaces=False).save_pretrained(args.out)
    (args.out / "calib.txt").write_text(train_text[:300_000])
    (args.out / "eval.txt").write_text(eval_text)
    (args.out / "training.json").write_text(json.dumps(
        {"seed": SEED, "steps": args.steps, "seconds": round(time.time() - start), "held_out_bits_per_byte": round(bpb, 4),
         "parameters": model.num_parameters(), "dropout": args.dropout, "bpe_dropout": args.bpe_dropout}, indent=2) + "\n")


if __name__ == "__main__":
    main()
