"""Random JSON schemas whose answers are short, and requests for structured outputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rollout.messages import AddRequest
from rollout.sampling.grammar import as_grammar
from rollout.sampling.params import SamplingParams, StructuredOutputsParams
from tests.support import tiny_models, tiny_tokenizers


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of what llguidance knows; each string, list and number of an answer is short."""
    kinds = ["string", "integer", "enum", "boolean", "null", "pattern", "number"]
    kind = rng.choice(kinds if depth == 0 else [*kinds, "object", "object", "array", "anyOf", "ref"])
    low = rng.randint(-50, 50)
    match kind:
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(ab|ba)+x?$", "^\\d{3}-\\d{2}$"])}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + 1 + rng.randint(0, 9)}
        case "enum":
            return {
                "enum": rng.sample(["a", "ab", 12, -1.5, True, None, [1], {"k": "v"}, 'q"\n', "é"], rng.randint(1, 4))
            }
        case "array":
            least = rng.randint(0, 2)
            items = schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case "object":
            names = rng.sample(["a", "b", "name", 'x"y', "é", "n m"], rng.randint(0, 4))
            properties = {name: schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "anyOf":
            return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "ref":
            return {"$defs": {"d": schema(rng, 0)}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2}
        case _:
            return {"type": kind}


def top(rng: random.Random) -> dict[str, Any]:
    """A whole schema: a reference within must find its definition at the root."""
    made = schema(rng)
    definitions: dict[str, Any] = {}

    def lifted(part: Any) -> Any:
        if isinstance(part, list):
            return [lifted(item) for item in part]
        if not isinstance(part, dict) or "enum" in part:
            return part
        if "$defs" in part:
            name = f"d{len(definitions)}"
            definitions[name] = part["$defs"]["d"]
            part = {**part, "items": {"$ref": f"#/$defs/{name}"}}
            del part["$defs"]
        return {key: lifted(value) for key, value in part.items()}

    found: dict[str, Any] = lifted(made)
    return found | ({"$defs": definitions} if definitions else {})


def build(path: Path, name: str = "llama") -> Path:
    """A tiny model with a tokenizer of its own: texts are bytes and `tiny_tokenizers.PIECES`."""
    tiny_models.build(name, path)
    tiny_tokenizers.of_tiny_models().save_pretrained(path)
    return path


def request(request_id: str, prompt: list[int], structured: dict[str, Any], **params: Any) -> AddRequest:
    """A request for structured outputs that asks for logprobs and masks."""
    asked = StructuredOutputsParams(**structured)
    sampling = SamplingParams(**{"logprobs": 0, "max_tokens": 200, **params}, structured_outputs=asked)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        return_sampling_mask=True,
        grammar=as_grammar(asked),
    )
