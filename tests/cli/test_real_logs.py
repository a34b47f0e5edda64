import pytest

LOGS = [
    "ml-100k/u.data",
    "ml-latest-small/ratings.csv",
    "movietweetings/ratings.dat",
    "lastfm-2k/user_artists.dat",
    "musical-instruments/reviews.jsonl",
    "anime/anime_ratings.dat.gz",
    "ml-1m/ratings.dat.gz",
]


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
def test_a_real_log_prepares_and_trains_an_epoch(ncf, shared_data, log):
    status, out, err = ncf("prepare", shared_data / log, "-o", "data", "--min-ratings", 5)
    assert (status, err) == (0, "")
    assert "bad rows skipped:            0" in out
    status, out, err = ncf("train", "--data", "data", "--checkpoint-dir", "run", "-e", 1, "--device", "cpu")
    assert (status, err) == (0, "")
    assert "\nNew Best Epoch: 01" in out
    status, out, _ = ncf("evaluate", "--checkpoint-dir", "run")
    assert status == 0
    assert "HR@10" in out
