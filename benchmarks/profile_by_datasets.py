"""Count the tokens of a file with `datasets.map(batched, num_proc)`, for bench_profile.py."""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import PreTrainedTokenizerFast

ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def as_message(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn as the template wants it, without the nulls of merged schemas."""
    if "from" in turn:
        return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
    message = {name: value for name, value in turn.items() if value is not None}
    for call in message.get("tool_calls") or ():
        call["function"] = {k: v for k, v in call["function"].items() if v is not None}
    return {"content": "", **message}


def main() -> None:
    """Read the job from stdin, print the number of tokens."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    job = json.load(sys.stdin)
    keys = job["keys"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["tokenizer"])

    def lengths(batch: dict[str, list[Any]]) -> dict[str, list[int]]:
        if "text_key" in keys:
            texts = batch[keys["text_key"]]
        elif "messages_key" in keys:
            tools = batch.get(keys.get("tools_key", ""), [None] * len(batch[keys["messages_key"]]))
            texts = [
                tokenizer.apply_chat_template(
                    [as_message(turn) for turn in turns],
                    tools=(json.loads(given) or None) if given else None,
                    tokenize=False,
                )
                for turns, given in zip(batch[keys["messages_key"]], tools, strict=True)
            ]
        else:
            texts = [
                tokenizer.apply_chat_template(
                    [
                        {"role": "user", "content": prompt},
                        {"role": "assistant", "content": response},
                    ],
                    tokenize=False,
                )
                for prompt, response in zip(
                    batch[keys["prompt_key"]], batch[keys["response_key"]], strict=True
                )
            ]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return {"length": [len(row) for row in ids]}

    rows = Dataset.from_parquet(job["file"])
    counted = rows.map(
        lengths, batched=True, num_proc=job["num_proc"], remove_columns=rows.column_names
    )
    print(sum(counted["length"]))


if __name__ == "__main__":
    main()
