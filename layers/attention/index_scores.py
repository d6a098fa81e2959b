"""The indexer's scores over gathered index keys: the torch reference."""

import torch

# Head scores [rows, heads, positions] held at a time: bounds the temporary at 128 MB.
_SCORES_LIMIT = 1 << 25


def index_scores(
    q: torch.Tensor, gates: torch.Tensor, keys: torch.Tensor, out: torch.Tensor, num_sequences: int
) -> None:
    """out[t, s] = sum_h gates[t, h] relu(q[t, h] . k[s]).

    q [rows, heads, d]; gates [rows, heads] float32; keys [num_sequences * pages, page_size, d], the pages of each
    sequence in order; out [rows, pages * page_size] float32. Sequences have equally many neighbouring rows.
    """
    rows, heads, dim = q.shape
    keys = keys.view(num_sequences, -1, dim).transpose(1, 2)  # [sequences, d, positions]
    n = rows // num_sequences
    at_once = max(1, _SCORES_LIMIT // (heads * keys.shape[-1]))  # rows
    if n > at_once:  # a long chunk: some of its rows at a time
        for i in range(num_sequences):
            for lo in range(i * n, (i + 1) * n, at_once):
                span = slice(lo, min(lo + at_once, (i + 1) * n))
                _score(q[span], gates[span], keys[i : i + 1], out[span])
        return
    for lo in range(0, num_sequences, max(1, at_once // n)):
        hi = min(lo + max(1, at_once // n), num_sequences)
        _score(q[lo * n : hi * n], gates[lo * n : hi * n], keys[lo:hi], out[lo * n : hi * n])


def _score(q: torch.Tensor, gates: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    products = torch.bmm(q.reshape(keys.shape[0], -1, q.shape[-1]), keys).relu_().float()
    torch.bmm(gates[:, None], products.view(*gates.shape, -1), out=out[:, None])
