"""Deaths of the stand-in gang of a loop world."""

from collections.abc import Callable

from support.loop_world import World


def die_once(world: World, update: int, before: Callable[[], None] = lambda: None) -> list[int]:
    """Let the gang die before an update, once; return a list that then has its number.

    ``before``: is called before each update.
    """
    died: list[int] = []

    def die(updates: int) -> None:
        before()
        if updates == update and not died:
            died.append(updates)
            world.groups[-1].died.set_exception(world.groups[-1].death())
            raise world.groups[-1].death()

    world.before_update = die
    return died
