"""Push weights into a request that is being generated, and see which weights sampled which tokens.

rollout serve path/to/model --enable-scale-out
python examples/push_while_generating.py path/to/model
"""

from __future__ import annotations

import argparse
import threading

import torch
from transformers import AutoModelForCausalLM

from trainer_bridge import RolloutClient, WeightSender


def main() -> None:
    """Start a long request, change the model a little, push it, and print the spans of the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder that the server serves")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    with RolloutClient(args.url) as client, WeightSender.connect(client, model) as sender:
        started = threading.Event()
        spans = []

        def generate() -> None:
            params = {"max_tokens": args.max_tokens, "ignore_eos": True}
            for piece in client.stream([1, 2, 3], params):
                started.set()
                for choice in piece.choices:
                    spans.extend(choice.spans)  # they come with the last piece

        request = threading.Thread(target=generate)
        request.start()
        if not started.wait(timeout=60):
            raise SystemExit("the server sent no token within 60 s")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)  # stands for an optimizer step
        pushed = sender.push(version="a-little-larger")
        print(f"pushed {pushed.bytes / 1e6:.0f} MB in {pushed.seconds:.2f} s as epoch {pushed.epoch}")
        request.join(timeout=600)
        for span in spans:
            print(f"tokens {span.start:4} to {span.end:4}: {span.version} (epoch {span.epoch}, cache {span.kv})")


if __name__ == "__main__":
    main()
