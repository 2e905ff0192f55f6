"""Every block of `U` as a dense matrix that acts on the row-major flattened block, by formulas of their own."""

from collections.abc import Callable

import torch
from torch import Tensor

from llqr.metric import Factors, Flat, Structure


def dense_blocks(group: Structure, factors: Factors) -> list[Tensor]:
    """By the formula of the structure; of one that has none here, by applying `U` to basis vectors."""
    if group.name not in DENSE:
        return applied_to_basis(group, factors)
    return DENSE[group.name](group, group.reordered(factors, to_memory=False))


def applied_to_basis(group: Structure, factors: Factors) -> list[Tensor]:
    """One basis vector of every block at a time: `U` does not mix blocks."""
    like = next(iter(factors.values()))
    columns: list[list[Tensor]] = [[] for _ in group.blocks]
    for i in range(max(block.size for block in group.blocks)):
        basis = [torch.zeros(block.native, dtype=like.dtype, device=like.device) for block in group.blocks]
        for vector in basis:
            vector.view(-1)[i : i + 1] = 1.0
        applied = group.unpack(group.apply(factors, group.pack(basis)))
        for block, own, column in zip(group.blocks, columns, applied, strict=True):
            if i < block.size:
                own.append(column.reshape(-1))
    return [torch.stack(own, 1) for own in columns]


def of_diagonal(group: Flat, f: Factors) -> list[Tensor]:
    return [torch.diag(d.reshape(-1)) for d in group.unpack(f["diagonal"])]


def of_scalar(group: Flat, f: Factors) -> list[Tensor]:
    numbers = dict(zip(group.layers, f["scalar"], strict=True))
    return [numbers[b.layer] * torch.eye(b.size).to(numbers[b.layer]) for b in group.blocks]


def of_identity(group: Flat, f: Factors) -> list[Tensor]:
    return [torch.eye(block.size, dtype=block.dtype, device=block.device) for block in group.blocks]


def of_kfac(group: Structure, f: Factors) -> list[Tensor]:
    return [torch.kron(out, inner) for out, inner in zip(f["out"], f["in"], strict=True)]


def of_positive_kfac(group: Structure, f: Factors) -> list[Tensor]:
    return of_kfac(group, {name: factor @ factor.mT for name, factor in f.items()})


def of_ekfac(group: Structure, f: Factors) -> list[Tensor]:
    return _scaled([torch.kron(out, inner) for out, inner in zip(f["out"], f["in"], strict=True)], f["scale"])


def of_positive_ekfac(group: Structure, f: Factors) -> list[Tensor]:
    return of_ekfac(group, f | {"scale": f["scale"] * f["scale"]})


def of_one_sided_ekfac(group: Structure, f: Factors) -> list[Tensor]:
    bases = []
    for q in f["basis"]:
        eye = torch.eye(max(group.m, group.n), dtype=q.dtype, device=q.device)
        bases.append(torch.kron(eye, q) if group.n <= group.m else torch.kron(q, eye))
    return _scaled(bases, f["scale"])


def of_channel_ekfac(group: Structure, f: Factors) -> list[Tensor]:
    q_in = f["in"]
    eye = torch.eye(group.blocks[0].kernel_positions, dtype=q_in.dtype, device=q_in.device)
    return of_ekfac(group, f | {"in": torch.stack([torch.kron(q, eye) for q in q_in])})


def _scaled(bases: list[Tensor], scales: Tensor) -> list[Tensor]:
    return [(basis * scale.reshape(-1)) @ basis.mT for basis, scale in zip(bases, scales, strict=True)]


def of_diag_kfac(group: Structure, f: Factors) -> list[Tensor]:
    return [torch.diag(torch.outer(out, inner).reshape(-1)) for out, inner in zip(f["out"], f["in"], strict=True)]


def of_dense(group: Structure, f: Factors) -> list[Tensor]:
    return list(0.5 * (f["dense"] + f["dense"].mT))


DENSE: dict[str, Callable[..., list[Tensor]]] = {
    "diagonal": of_diagonal,
    "scalar": of_scalar,
    "identity": of_identity,
    "kfac": of_kfac,
    "kfac-psd": of_positive_kfac,
    "e-kfac": of_ekfac,
    "e-kfac-psd": of_positive_ekfac,
    "e-kfac-one-sided": of_one_sided_ekfac,
    "e-kfac-channels": of_channel_ekfac,
    "diag-kfac": of_diag_kfac,
    "dense": of_dense,
}
