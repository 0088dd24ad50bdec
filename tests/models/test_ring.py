from tests.ranks import run_ranks


def test_ring_attention_equals_dense_attention_in_float64():
    run_ranks(4, "tests.models.ring_ranks")
