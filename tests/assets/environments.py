"""Tools and environments of the tests."""

import asyncio
import os
import pathlib
import random
import signal
import time


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


async def divide(a: float, b: float) -> float:
    """Divides.

    Args:
        a: What is divided.
        b: By what.
    """
    await asyncio.sleep(0.01)
    return a / b


def bare(a, b):
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def mute(a: int) -> int:
    return a


def guess(number: int) -> str:
    """Guesses.

    Args:
        number: The guess.
    """
    return "no"


def pass_over(seconds: float) -> None:
    """On this process's clock: whoever waits for less has waited."""
    clock = time.monotonic
    time.monotonic = lambda: clock() + seconds


class Guess:
    """Find the number that the seed chose."""

    def __init__(self, top: int = 4):
        self.top, self.tries, self.done = top, 0, False

    def reset(self, seed: int, **row):
        self.secret, self.row = seed % self.top, row
        return f"below {self.top}"

    def guess(self, number: int) -> str:
        """Says whether the number is too low or too high.

        Args:
            number: The guess.
        """
        self.tries += 1
        self.done = number == self.secret
        return "right" if self.done else "too low" if number < self.secret else "too high"

    def turn_reward(self) -> float:
        return 0.25 * self.done

    def get_reward(self) -> float:
        return float(self.done)


class Troubled(Guess):
    """Fails in a way of the row's choice, as often as a file in `folder` has not been written."""

    def __init__(self, folder: str, fails: int = 1):
        super().__init__()
        self.folder, self.fails = pathlib.Path(folder), fails

    async def reset(self, seed: int, **row):
        self.loop = asyncio.get_running_loop()
        return super().reset(seed, **row)

    def guess(self, number: int) -> str:
        """Fails, or guesses.

        Args:
            number: The guess.
        """
        kind = self.row["kind"]
        marks = list(self.folder.glob(f"{kind}-{self.secret}-*"))
        if len(marks) < self.fails:
            (self.folder / f"{kind}-{self.secret}-{len(marks)}").touch()
            if kind == "raised":
                raise ConnectionError("no network")
            if kind == "died":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "holds":
                9**9**9  # one C call that keeps the interpreter
            pass_over(3600)
            self.loop.call_soon_threadsafe(lambda: None)  # it looks at the clock
            time.sleep(600)
        return super().guess(number)

    def get_reward(self):
        return float(self.tries)


class Shy(Guess):
    def get_reward(self):
        return None


class Counter:
    """As TRL's `environment_factory` takes one, but for `seed`."""

    def reset(self, seed: int, **kwargs) -> str | None:
        self.count, self.start = 0, kwargs["start"]
        return None

    def increment(self, step: int) -> int:
        """Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.start + self.count

    async def read(self) -> dict:
        """Reads the counter."""
        return {"count": self.count}


class NoReset:
    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: The guess.
        """
        return "no"


class Dice:
    """Another answer and another verdict each time, some of them late."""

    def reset(self, seed: int, **row):
        self.random = random.SystemRandom()

    async def roll(self) -> str:
        """Rolls the dice."""
        await asyncio.sleep(self.random.choice([0, 0, 0.03]))
        return str(self.random.randint(1, 6))

    def get_reward(self) -> float:
        return self.random.random()


class Starts:
    """The number of starts that a file counts; none is noticed until the second roll, or never."""

    def __init__(self, folder: str, hides: bool = False):
        self.path, self.hides = pathlib.Path(folder) / "starts", hides

    def reset(self, seed: int, **row):
        with self.path.open("a") as file:
            file.write("x")
        self.number, self.rolls = 0 if self.hides else self.path.stat().st_size, 0
        return "roll"

    def roll(self) -> str:
        """Rolls the dice."""
        self.rolls += 1
        return str(self.number * (self.rolls > 1))

    def get_reward(self) -> float:
        return self.number + self.rolls / 10


class Clock:
    """Answers that the seed has fixed, some of them late."""

    def __init__(self, most_s: float = 0.1):
        self.most_s = most_s

    def reset(self, seed: int, **row):
        self.random = random.Random(seed)

    async def roll(self) -> str:
        """Rolls the dice."""
        await asyncio.sleep(self.most_s * self.random.choice([0, 0.2, 1]))
        return str(self.random.randint(1, 6))

    def get_reward(self) -> float:
        return self.random.random()


class Absent(Clock):
    """Fails as long as the file `away` is there."""

    def __init__(self, away: str):
        super().__init__(0.0)
        self.away = pathlib.Path(away)

    def reset(self, seed: int, **row):
        if self.away.exists():
            raise ConnectionError("nobody is there")
        super().reset(seed)


class Late(Clock):
    """Answers that the seed has fixed, as late as it happens."""

    async def roll(self) -> str:
        """Rolls the dice."""
        await asyncio.sleep(random.SystemRandom().uniform(0, self.most_s))
        return str(self.random.randint(1, 6))
