"""Which column of a log is the user, the item, the rating and the time."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ncf.config import PrepareConfig
from ncf.errors import InputError, NcfWarning
from ncf.ingest.times import is_number, is_time

# the names a column is known by, case and punctuation ignored; where two are present the earlier one counts
KNOWN = {
    "user": (
        "userid userids user users uid reviewerid reviewer customerid customer visitorid memberid member accountid"
        " account personid person profileid profile playerid player listenerid readerid authorid username"
    ).split(),
    "item": (
        "itemid itemids item items iid movieid movieids movie filmid film asin parentasin isbn isbn13 productid product"
        " artistid artist songid song trackid track albumid album bookid book animeid animeids anime gameid game appid"
        " businessid business recipeid recipe articleid article newsid storyid videoid video placeid venueid poiid"
        " courseid jobid sku goodid"
    ).split(),
    "value": (
        "rating ratings score scores stars star overall value weight feedback playcount plays listens count counts"
        " bookrating userrating preference"
    ).split(),
    "time": (
        "timestamp timestamps unixreviewtime unixtime unixtimestamp datetime time ts epoch date reviewtime ratingtime"
        " ratedat createdat createtime eventtime visittime reviewdate"
    ).split(),
}
ROLES = tuple(KNOWN)
NAMING = "name them with --user-column and --item-column"


@dataclass(frozen=True)
class Roles:
    """The index of each role's column; None where the log has none."""

    user: int
    item: int
    value: int | None
    time: int | None


def plain(name: str) -> str:
    """A column's name without case and punctuation: `User_ID` -> `userid`."""
    return re.sub(r"[\W_]", "", name.casefold())


def is_known(name: str) -> bool:
    """Whether a header would have this cell."""
    return any(plain(name) in names for names in KNOWN.values())


def wanted(config: PrepareConfig) -> dict[str, str]:
    """The columns that the user named, by role."""
    given = {role: getattr(config, f"{role}_column") for role in ROLES}
    return {role: name for role, name in given.items() if name is not None}


def find_column(name: str, names: Sequence[str]) -> int | None:
    """The index of the column called `name`: exactly, or but for case and punctuation, or by its number from 1."""
    for same in (lambda other: other == name, lambda other: plain(other) == plain(name) != ""):
        if found := [index for index, other in enumerate(names) if same(other)]:
            return found[0]
    return int(name) - 1 if name.isdecimal() and 1 <= int(name) <= len(names) else None


def pick_roles(
    names: Sequence[str] | None, sample: Sequence[Sequence[str]], config: PrepareConfig, where: str
) -> Roles:
    """Decide the columns' roles, by the options, then by the header's `names`, or by position without a header.

    `sample` holds the first rows' cells, for columns without a name. Raises InputError, with the columns found, when
    a column that was asked for is not there or when user and item cannot be told.
    """
    width = len(names) if names is not None else len(sample[0])
    taken: dict[str, int] = {}
    for role, name in wanted(config).items():
        index = find_column(name, names or [""] * width)
        if index is None:
            raise InputError(f"{where} has no column {name!r} (--{role}-column): found {listed(names, width)}")
        if index in taken.values():
            raise InputError(f"--{role}-column {name!r} is already another column's role: give each its own")
        taken[role] = index
    if names is not None:
        _take_by_name(taken, names)
        rated = [row[taken["value"]] for row in sample if len(row) == width] if "value" in taken else []
        if rated and config.value_column is None and not any(map(is_number, rated)):
            del taken["value"]  # feedback in words
    else:
        _take_by_position(taken, sample, width)
    if not {"user", "item"} <= set(taken):
        raise InputError(f"{where} has no column known as user or item: found {listed(names, width)}; {NAMING}")
    return Roles(taken["user"], taken["item"], taken.get("value"), taken.get("time"))


def listed(names: Sequence[str] | None, width: int) -> str:
    """The columns found, for an error."""
    return ", ".join(repr(name) for name in names) if names is not None else f"{width} columns without names"


def _take_by_name(taken: dict[str, int], names: Sequence[str]) -> None:
    simple = [plain(name) for name in names]
    for role, known in KNOWN.items():
        if role not in taken:
            found = [
                simple.index(name) for name in known if name in simple and simple.index(name) not in taken.values()
            ]
            taken.update({role: found[0]} if found else {})
    for role, other in (("user", "item"), ("item", "user")):
        if role not in taken and other in taken:
            after = [*range(taken[other] + 1, len(names)), *range(taken[other])]
            free = [index for index in after if index not in taken.values()]
            named = [index for index in free if simple[index].endswith("id")]
            taken.update({role: (named or free)[0]} if free else {})
            if len(free) > 1 and not named:
                guess = f"the {role} is taken to be column {names[free[0]]!r}, of which nothing says so"
                warnings.warn(f"{guess}: name it with --{role}-column", NcfWarning, stacklevel=5)


def _take_by_position(taken: dict[str, int], sample: Sequence[Sequence[str]], width: int) -> None:
    given = set(taken)
    for position, role in enumerate(ROLES):
        free = [index for index in range(width) if index not in taken.values()]
        if role not in taken and position in free:
            taken[role] = position
        elif role not in taken and role in ("user", "item") and free:
            taken[role] = free[0]
    third = taken.get("value")
    if third is None or "value" in given:
        return
    cells = [row[third] for row in sample if len(row) == width]
    if "time" not in given and all(map(is_time, cells)):
        del taken["value"]
        fourth = taken.pop("time", None)
        taken["time"] = third
        if fourth is not None and all(is_number(row[fourth]) for row in sample if len(row) == width):
            taken["value"] = fourth
    elif not any(is_number(cell) for cell in cells):
        del taken["value"]  # a column of text, such as a title
