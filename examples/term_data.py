"""Data of the examples `fairness`, `knowledge`, `simulation` and `odds`, and the simulator that `simulation` uses.

python -m examples.term_data        writes the files in examples/data again

The rows have the format of `tinker_flows:LabelledBuilder`, or for `draws` that of
`tinker_flows:LabelDistributionBuilder`. Everything is drawn from a fixed seed.
"""

from __future__ import annotations

import json
import math
import random
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
CAPITALS = DATA / "capitals.sqlite"
OLD, YOUNG = 0, 1

_COUNTRIES = """
Austria Vienna, Belgium Brussels, Bolivia Sucre, Bulgaria Sofia, Chile Santiago, Cuba Havana, Denmark Copenhagen,
Egypt Cairo, Estonia Tallinn, Finland Helsinki, France Paris, Germany Berlin, Ghana Accra, Greece Athens,
Hungary Budapest, Iceland Reykjavik, Ireland Dublin, Italy Rome, Japan Tokyo, Kenya Nairobi, Latvia Riga,
Lithuania Vilnius, Morocco Rabat, Nepal Kathmandu, Norway Oslo, Peru Lima, Poland Warsaw, Portugal Lisbon,
Romania Bucharest, Senegal Dakar, Spain Madrid, Sweden Stockholm, Thailand Bangkok, Tunisia Tunis, Uruguay Montevideo
"""
_COLORS = ("red", "green", "blue")
_GRAVITY = 9.81  # m/s^2
_DRAG = 0.01  # 1/m: deceleration by the air is _DRAG times the squared speed
_TIME_STEP = 0.005  # seconds
_THROW = re.compile(r"reach (\d+) m, throw at (\d+) degrees with (\d+(?:\.\d+)?) m/s")


def loans(count: int, generator: random.Random) -> Iterator[dict[str, Any]]:
    """Loan applications with the decisions of a biased clerk.

    From the young, the clerk demands twice as much income after debts.

    The label `group` is on all rows. The label `accepted` is the group too, but only on rows that the clerk accepted. A
    term on it therefore measures equal opportunity: among these applications, the model should say yes equally often
    for both groups.
    """
    for _ in range(count):
        group, income, debt = generator.choice((OLD, YOUNG)), generator.randint(10, 60), generator.randint(0, 20)
        age = generator.randint(20, 29) if group == YOUNG else generator.randint(50, 65)
        is_accepted = income - debt > (30 if group == YOUNG else 15)
        yield {
            "prompt": f"Age {age}, income {income}00 a month, debts of {debt}00 a month. Grant the loan?",
            "completions": ["yes" if is_accepted else "no"],
            "labels": {"group": group} | ({"accepted": group} if is_accepted else {}),
        }


def capitals(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Questions about capitals, each with the true answer and with the capital of another country."""
    cities = read_capitals()
    for country, city in cities.items():
        other = generator.choice([name for name in cities.values() if name != city])
        answers = [f"The capital of {country} is {name}." for name in (city, other)]
        yield {"prompt": f"What is the capital of {country}?", "completions": answers, "labels": {}}


def throws(count: int, generator: random.Random) -> Iterator[dict[str, Any]]:
    """Distances of a ball, each with a throw that reaches it and with one that does not."""
    for _ in range(count):
        angle, speed = generator.randint(25, 60), generator.randint(12, 30)
        target = round(land(angle, speed))
        wrong_speed = speed * generator.choice((0.6, 0.8, 1.3))
        answers = [
            f"To reach {target} m, throw at {angle} degrees with {value:.1f} m/s." for value in (speed, wrong_speed)
        ]
        yield {"prompt": f"How do I throw a ball {target} m far?", "completions": answers, "labels": {}}


def draws(count: int, generator: random.Random) -> Iterator[dict[str, Any]]:
    """Draws from bags of eight marbles, with the odds of each colour."""
    for _ in range(count):
        shares = [generator.random() for _ in _COLORS]
        marbles = generator.choices(_COLORS, shares, k=8)
        odds = {color: marbles.count(color) for color in _COLORS if color in marbles}
        yield {"prompt": f"Marbles: {', '.join(marbles)}. Draw one.", "distribution": odds}


def read_capitals() -> dict[str, str]:
    """Return the capital of each country."""
    return dict(re.findall(r"(\w+) (\w+)", _COUNTRIES))


def land(angle: float, speed: float) -> float:
    """Simulate a throw with air resistance; return where the ball lands, in metres.

    Args:
        angle: degrees above the horizon.
        speed: metres per second.

    >>> 30 < land(45, 20) < 20**2 / _GRAVITY  # less than without air
    True
    """
    x, y = 0.0, 0.0
    vx, vy = (speed * turn(math.radians(angle)) for turn in (math.cos, math.sin))
    while y >= 0:
        drag = _DRAG * math.hypot(vx, vy)
        x, y = x + vx * _TIME_STEP, y + vy * _TIME_STEP
        vx, vy = vx - drag * vx * _TIME_STEP, vy - (_GRAVITY + drag * vy) * _TIME_STEP
    return x


def miss(text: str) -> float:
    """Score the throw that a text describes: its error relative to the distance, at most 1.

    A text without a throw has the score 1, and so have a distance of 0 and a speed above 1000 m/s, for which the time
    step of the simulation is too long.

    >>> round(miss("To reach 30 m, throw at 45 degrees with 5.0 m/s."), 2), miss("Throw it hard.")
    (0.92, 1.0)
    """
    throw = _THROW.search(text)
    if throw is None:
        return 1.0
    target, angle, speed = (float(number) for number in throw.groups())
    if target == 0 or speed > 1000:
        return 1.0
    return min(1.0, abs(land(angle, speed) - target) / target)


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of a JSONL file."""
    (DATA / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    """Write the files."""
    generator = random.Random(0)
    write("loans.jsonl", loans(128, generator))
    write("loans_test.jsonl", loans(32, generator))
    write("capitals.jsonl", capitals(generator))
    write("throws.jsonl", throws(64, generator))
    write("draws.jsonl", draws(256, generator))
    write("draws_test.jsonl", draws(32, generator))
    CAPITALS.unlink(missing_ok=True)
    with closing(sqlite3.connect(CAPITALS)) as database, database:
        database.execute("CREATE TABLE capitals (country TEXT PRIMARY KEY, city TEXT)")
        database.executemany("INSERT INTO capitals VALUES (?, ?)", read_capitals().items())


if __name__ == "__main__":
    main()
