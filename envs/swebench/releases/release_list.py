"""The pairs of releases that agentkit ships as SWE tasks: names, versions and checksums, without files.

Invariant: each pair gives the same task on every machine.
"""

from __future__ import annotations

from agentkit.envs.swebench.releases.build_task import Pair

_XMLTODICT = """\
* `parse` takes generators of strings, besides strings and files.
* `parse(..., process_comments=True)` keeps comments of the document: they become values of the key `comment_key`
  (an argument too, `#comment` by default) of the element that they stand in.
* `namespaces` may be any mapping, one with default values and an empty one included.
* Dictionaries are plain ones where Python keeps them in order, instead of `OrderedDict`.
* `unparse` writes empty lists, and takes `expand_iter`, the name of the elements that a nested list becomes.
"""
_WCWIDTH = """\
* **Bugfix** zero-width support for Hangul Jamo (Korean): vowels and trailing consonants (U+1160 to U+11FF) combine.
"""

SHIPPED: tuple[Pair, ...] = (
    Pair(
        "marshmallow",
        "3.21.0",
        "3.21.1",
        packages=("pytz==2024.1", "simplejson==3.19.2"),
        sha256=(
            "20f53be28c6e374a711a16165fb22a8dc6003e3f7cda1285e3ca777b9193885b",
            "4e65e9e0d80fc9e609574b9983cf32579f305c718afb30d7233ab818571768c3",
        ),
    ),
    Pair(
        "tomlkit",
        "0.12.1",
        "0.12.2",
        packages=("PyYAML==6.0.1",),
        sha256=(
            "38e1ff8edb991273ec9f6181244a6a391ac30e9f5098e7535640ea6be97a7c86",
            "df32fab589a81f0d7dc525a4267b6d7a64ee99619cbd1eeb0fae32c1dd426977",
        ),
    ),
    Pair(
        "tomlkit",
        "0.13.0",
        "0.13.1",
        packages=("PyYAML==6.0.1",),
        sha256=(
            "08ad192699734149f5b97b45f1f18dad7eb1b6d16bc72ad0c2335772650d7b72",
            "1be06879860054a26faba7acf2af62b45c94aa43b00a5f87fc445c5f930ad754",
        ),
    ),
    Pair(
        "sqlparse",
        "0.5.0",
        "0.5.1",
        sha256=(
            "714d0a4932c059d16189f58ef5411ec2287a4360f17cdd0edd2d09d4c5087c93",
            "bb6b4df465655ef332548e24f08e205afc81b9ab86cb1c45657a7ff173a3a00e",
        ),
    ),
    Pair(
        "sqlparse",
        "0.5.1",
        "0.5.2",
        sha256=(
            "bb6b4df465655ef332548e24f08e205afc81b9ab86cb1c45657a7ff173a3a00e",
            "9e37b35e16d1cc652a2545f0997c1deb23ea28fa1f3eefe609eee3063c3b105f",
        ),
    ),
    Pair(
        "parso",
        "0.8.3",
        "0.8.4",
        sha256=(
            "8c07be290bb59f03588915921e29e8a50002acaf2cdc5fa0e0114f91709fafa0",
            "eb3a7b58240fb99099a345571deecc0f9540ea5f4dd2fe14c2a99d6b281ab92d",
        ),
    ),
    Pair(
        "xmltodict",
        "0.12.0",
        "0.13.0",
        statement=_XMLTODICT,
        sha256=(
            "50d8c638ed7ecb88d90561beedbf720c9b4e851a9fa6c47ebd64e99d166d8a21",
            "341595a488e3e01a85a9d8911d8912fd922ede5fecc4dce437eb4b6c8d037e56",
        ),
    ),
    Pair(
        "jinja2",
        "3.1.2",
        "3.1.3",
        packages=("MarkupSafe==2.1.5",),
        sha256=(
            "31351a702a408a9e7595a8fc6150fc3f43bb6bf7e319770cbc0db9df9437e852",
            "ac8bd6544d4bb2c9792bf3a159e80bba8fda7f07e81bc3aed565432d5925ba90",
        ),
    ),
    Pair(
        "boltons",
        "24.0.0",
        "24.1.0",
        sha256=(
            "7153feccaea1ff2e1472f68d4b57fadb796a2ee49d29f638f1c9cd8fb5ebd916",
            "4a49b7d57ee055b83a458c8682a2a6f199d263a8aa517098bda9bab813554b87",
        ),
    ),
    Pair(
        "wcwidth",
        "0.2.12",
        "0.2.13",
        statement=_WCWIDTH,
        sha256=(
            "f01c104efdf57971bcb756f054dd58ddec5204dd15fa31d6503ea57947d97c02",
            "72ea0c06399eb286d978fdedb6923a9eb47e1c486ce63e9b4e64fc18303972b5",
        ),
    ),
    Pair(
        "more-itertools",
        "8.13.0",
        "8.14.0",
        sha256=(
            "a42901a0a5b169d925f6f217cd5a190e32ef54360905b9c39ee7db5313bfec0f",
            "c09443cd3d5438b8dafccd867a6bc1cb0894389e90cb53d227456b0b0bccb750",
        ),
    ),
    Pair(
        "click",
        "8.1.3",
        "8.1.4",
        sha256=(
            "7682dc8afb30297001674575ea00d1814d808d6a36af415a82bd481d37ba7b8e",
            "b97d0c74955da062a7d4ef92fadb583806a585b2ea81958a81bd72726cbb8e37",
        ),
    ),
)
