"""Small tokenizers of each kind, whose every id can be written down by hand."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = "<|end|>"
ADDED = "<tool>"  # added, but not special


def byte_level() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes; 256 to 258 make "你😀a", each but part of a character; then two words."""
    chars = bytes_to_unicode()

    def token(data: bytes) -> str:
        return "".join(chars[byte] for byte in data)

    whole = "你😀a".encode()
    cut = [whole[:2], whole[2:4], whole[4:], b"the", " 好".encode()]
    vocab = {token(bytes([byte])): byte for byte in range(256)} | {token(data): 256 + i for i, data in enumerate(cut)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece's way, as Llama 2 has it: 256 byte tokens, then words, most of which open with a space."""
    words = ["▁", "▁Hi", "▁the", "re", "▁é", "你", "a", ",", "▁\ufffd"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's way: words are joined by spaces, but for `##`."""
    words = ["[UNK]", "un", "##likely", "is", "it", ".", "'", "##s", "好"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken(ADDED, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


PIECES = [
    '{"',
    '":',
    '",',
    '"}',
    "ab",
    "ba",
    "aab",
    "true",
    "false",
    "null",
    "12",
    "0.",
    '", "',
    "]}",
    "[[",
    "é",
    " a",
    "}}",
]


def of_tiny_models() -> PreTrainedTokenizerFast:
    """For `tiny_models`: 256 ids, of which 0 and 1 (EOS) are special and 2 to 31 stand for `PIECES`, tab and line feed;
    every other is the byte of its number."""
    chars = bytes_to_unicode()
    texts = [b"\t", b"\n", *(piece.encode() for piece in PIECES)]
    texts += [bytes([byte]) for byte in range(2, 32) if byte not in b"\t\n"][: 30 - len(texts)]
    data = dict(enumerate(texts, start=2)) | {byte: bytes([byte]) for byte in range(32, 256)}
    vocab = {"".join(chars[byte] for byte in text): token_id for token_id, text in data.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"<s>": 0, "</s>": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
