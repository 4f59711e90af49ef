from hypothesis import given
from hypothesis import strategies as st

from ppocli.data.prompt_set import prompt_indices

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
positions = st.integers(0, 500)


@given(n=sizes, seed=seeds, epoch=st.integers(0, 50))
def test_each_epoch_is_a_permutation(n, seed, epoch):
    order = prompt_indices(epoch * n, n, n=n, seed=seed, shuffle=True)
    assert sorted(order) == list(range(n))


@given(n=sizes, seed=seeds, start=positions, first=st.integers(0, 90), second=st.integers(0, 90),
       shuffle=st.booleans())
def test_a_cursor_resumes_the_order(*, n, seed, start, first, second, shuffle):
    whole = prompt_indices(start, first + second, n=n, seed=seed, shuffle=shuffle)
    head = prompt_indices(start, first, n=n, seed=seed, shuffle=shuffle)
    tail = prompt_indices(start + first, second, n=n, seed=seed, shuffle=shuffle)
    assert head + tail == whole
    assert all(type(index) is int for index in whole)


@given(n=sizes, seed=seeds, start=positions, count=st.integers(0, 90))
def test_without_shuffling_prompts_come_in_their_own_order(n, seed, start, count):
    order = prompt_indices(start, count, n=n, seed=seed, shuffle=False)
    assert order == [position % n for position in range(start, start + count)]


def test_seeds_and_epochs_differ():
    def epoch(number: int, seed: int) -> list[int]:
        return prompt_indices(number * 50, 50, n=50, seed=seed, shuffle=True)

    orders = [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert all(order != list(range(50)) for order in orders)
