"""recipes/papers/quality/mlr_partitions.py: clustered orders find planted blocks, and lower the error of MLR fits."""

from __future__ import annotations

import pytest
import torch

from recipes.papers.quality.mlr_partitions import cluster, compare, halve, held_share, input_moments, main


def planted(generator):
    """A matrix of four diagonal blocks, of low rank each, with shuffled rows and columns."""
    blocks = [torch.randn(8, 2, generator=generator) @ torch.randn(2, 12, generator=generator) for _ in range(4)]
    weight_OI = torch.block_diag(*blocks) + 0.01 * torch.randn(32, 48, generator=generator)
    return weight_OI[torch.randperm(32, generator=generator)][:, torch.randperm(48, generator=generator)]


def test_clusters_are_the_planted_blocks():
    weight_OI = planted(torch.Generator().manual_seed(0))
    rows, columns = cluster(weight_OI.square(), 2)
    assert sorted(rows.tolist()) == list(range(32)) and sorted(columns.tolist()) == list(range(48))
    assert held_share(weight_OI.square(), 4) < 0.5 < 0.95 < held_share(weight_OI.square()[rows][:, columns], 4)
    upper, left = halve(weight_OI.square())
    assert held_share(weight_OI.square()[upper][:, left], 2) > 0.95


def test_fits_in_a_clustered_order_are_better():
    generator = torch.Generator().manual_seed(1)
    found = compare(planted(generator), torch.eye(48), levels=3, keep=0.4)
    assert found["clustered"] < 0.8 * found["contiguous"] and found["clustered_share"] > found["contiguous_share"]
    assert all(0 < found[name] < 1 for name in ("low_rank", "contiguous", "clustered", "random"))


def test_moments_are_those_of_the_inputs():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    ids_BT = torch.tensor([[0, 1, 2], [3, 4, 0]])
    moment_II = input_moments(model, ids_BT, ["1"])["1"]
    x_NI = model[0](ids_BT).flatten(0, 1)
    torch.testing.assert_close(moment_II, x_NI.mT @ x_NI / 6, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("missing", ["SRC", "text.txt"])
def test_a_missing_file_is_one_sentence(missing, tmp_path, monkeypatch, capsys):
    (tmp_path / "SRC").mkdir()
    (tmp_path / "SRC/config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    monkeypatch.setattr(
        "sys.argv", ["mlr_partitions", str(tmp_path / "SRC"), "--calibration", str(tmp_path / "text.txt")]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert str(tmp_path / missing) in capsys.readouterr().err
