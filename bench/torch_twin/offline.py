"""Scoring many stored trajectories with the twin, as one writes it well: sorted by length, padded, in batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bench.torch_twin.model import RSSM


@torch.inference_mode()
def score(
    model: RSSM, table: np.ndarray, items: Sequence[tuple[np.ndarray, np.ndarray, int]], batch: int
) -> list[np.ndarray]:
    """Risks ``[T, 2]`` of trajectories given as row ids of ``table`` ``[N, E]`` (observations, actions, instruction).

    Texts are encoded once, all together; reading the risks is done for all steps of a batch at once.
    """
    place = model.init.out.weight.device
    vectors, encoded = torch.from_numpy(table).to(place), []
    for encoder, kind in ((model.obs_encoder, 0), (model.act_encoder, 1)):
        used = torch.from_numpy(np.unique(np.concatenate([item[kind] for item in items]))).to(place)
        found = encoder(vectors[used])
        every = torch.zeros(len(vectors), model.config.hidden, device=place, dtype=found.dtype)
        every[used] = found
        encoded.append(every)
    order = np.argsort([len(act) for _, act, _ in items], kind="stable")
    result: list[np.ndarray] = [np.empty((0, 2))] * len(items)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        longest = len(items[part[-1]][1])
        obs, act = (torch.zeros(len(part), longest, dtype=torch.long) for _ in range(2))
        for row, i in enumerate(part):
            n = len(items[i][1])
            obs[row, :n], act[row, :n] = torch.from_numpy(items[i][0]), torch.from_numpy(items[i][1])
        o, a = encoded[0][obs.to(place)], encoded[1][act.to(place)]
        e = model.ins_encoder(vectors[[items[i][2] for i in part]])
        h = torch.tanh(model.init(e))
        hs = []
        for t in range(longest):
            z = model.mode(model.latent_logits(model.posterior(torch.cat([h, o[:, t]], dim=-1))))
            h = model.core(h, torch.cat([z, a[:, t]], dim=-1))
            hs.append(h)
        every = torch.stack(hs, dim=1)
        zhat = model.mode(model.latent_logits(model.prior(every)))
        logits = model.risk_logits(every, zhat, a, e[:, None].expand(-1, longest, -1))
        risks = torch.sigmoid(logits.float()).cpu().numpy()
        for row, i in enumerate(part):
            result[i] = risks[row, : len(items[i][1])]
    return result
