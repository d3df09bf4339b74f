"""Virtual time for tests."""


class FakeClock:
    """Clock whose time passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
