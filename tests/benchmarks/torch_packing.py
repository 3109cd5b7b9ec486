"""What a plain PyTorch DataLoader does to documents: tokenise, pack, segment ids and positions."""

import numpy as np
import tokenizers
import torch


class Packed(torch.utils.data.IterableDataset):
    """Sequences of documents, filled one after the other; each worker has its share of those."""

    def __init__(self, texts: list[str], tokenizer: str, length: int):
        self.texts, self.path, self.length = texts, tokenizer, length

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        tokenizer = tokenizers.Tokenizer.from_file(self.path)
        separator = tokenizer.token_to_id("<|endoftext|>")
        row, room = [], self.length
        for text in self.texts[worker.id :: worker.num_workers]:
            ids = np.array([separator, *tokenizer.encode(text).ids, separator], np.int32)
            for at in range(0, len(ids) - 1, self.length):
                piece = ids[at : at + self.length + 1]
                if len(piece) - 1 > room:
                    yield self.example(row)
                    row, room = [], self.length
                row.append(piece)
                room -= len(piece) - 1
        if row:
            yield self.example(row)

    def example(self, pieces: list[np.ndarray]) -> dict[str, np.ndarray]:
        """One sequence, padded."""
        names = ("inputs", "targets", "segment_ids", "positions")
        made = {name: np.zeros(self.length, np.int32) for name in names}
        made["weights"] = np.zeros(self.length, np.float32)
        at = 0
        for segment, piece in enumerate(pieces, 1):
            part = slice(at, at + len(piece) - 1)
            made["inputs"][part], made["targets"][part] = piece[:-1], piece[1:]
            made["segment_ids"][part] = segment
            made["positions"][part] = np.arange(len(piece) - 1)
            made["weights"][part] = 1
            at += len(piece) - 1
        return made
