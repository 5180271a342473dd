"""Text that can be learnt, without a download: a Markov chain over words, drawn from a seed.

After each word one of a few others follows, the first of them most often. So a model that has learnt the chain
has a loss of `entropy`, and one that knows nothing a loss of log(n_words). Random tokens cannot be learnt.
"""

import torch


class Chain:
    """followers: (n_words, n_followers), the words that may follow each; chances: (n_followers,)."""

    def __init__(self, n_words, n_followers=4, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.followers = torch.randint(n_words, (n_words, n_followers), generator=self.random)
        self.chances = 0.5 ** torch.arange(1, n_followers + 1)
        self.chances[-1] = self.chances[-2]  # 1/2, 1/4, 1/8, 1/8: they add up to 1

    @property
    def entropy(self):
        """Of the next word, in nats; a little less where a word follows twice."""
        return -(self.chances * self.chances.log()).sum().item()

    def draw(self, n_texts, n_words):
        """(n_texts, n_words) of int64; each call goes on in the same stream of random numbers."""
        text = torch.empty(n_texts, n_words, dtype=torch.int64)
        text[:, 0] = torch.randint(len(self.followers), (n_texts,), generator=self.random)
        chosen = torch.multinomial(
            self.chances, n_texts * n_words, replacement=True, generator=self.random
        ).view(n_texts, n_words)
        for i in range(1, n_words):
            text[:, i] = self.followers[text[:, i - 1], chosen[:, i]]
        return text
