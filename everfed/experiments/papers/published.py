"""The published sizes of the data sets, and the labels of their official test parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """train, test: numbers of samples; 0 where no size is published. test_labels: `Source.test_labels` of the official
    test part, "" where it is not known."""

    train: int
    test: int = 0
    test_labels: str = ""


# where a set has no test part of its own, four fifths of it are counted as training samples
SETS = {
    "digits": Published(1_438),
    "mnist": Published(60_000, 10_000, "2fd8de6bdb8d1178"),
    "emnist": Published(240_000, 40_000),
    "emnist-digits": Published(240_000, 40_000),
    "usps": Published(7_291, 2_007),
    "svhn": Published(73_257, 26_032),
    "cifar10": Published(50_000, 10_000, "cbb7365de8ed11f0"),
    "cifar100": Published(50_000, 10_000, "80031c23f8300724"),
    "tiny-imagenet": Published(100_000, 10_000),
    "imagenet-32": Published(600_000),
    "imagenet-224": Published(600_000),
    "office31": Published(3_288),
    "office-caltech10": Published(2_026),
    "pacs": Published(7_993),
    "yahooqa": Published(1_400_000, 60_000),
}
DOMAINS = {"digit10": ("mnist", "emnist-digits", "usps", "svhn")}


def published(dataset: str) -> Published | None:
    """Of a set, or of a list of domains; None where it is not known."""
    domains = domains_of(dataset)
    if any(domain not in SETS for domain in domains):
        return None
    if len(domains) == 1:
        return SETS[domains[0]]
    sizes = [SETS[domain] for domain in domains]
    return Published(
        sum(one.train for one in sizes), sum(one.test for one in sizes) if all(s.test for s in sizes) else 0
    )


def domains_of(dataset: str) -> tuple[str, ...]:
    """The sets that `digit10` or a name such as mnist+usps is made of; a single set is its only domain."""
    return DOMAINS.get(dataset) or tuple(part.strip() for part in dataset.split("+"))
