"""Folders that others could change and links that lead elsewhere are refused by name; names never choose a path."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.sandbox.private_files import NAME_BYTES, file_name

SECRET = "the text behind the link"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside of the folder that a test looks at."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret.py").write_text(SECRET)
    return place / "secret.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir(mode=0o755)
    return made


def test_a_folder_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    made = private_files.directory(tmp_path / "a" / "b")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made, made.parent)] == [0o700, 0o700]
    assert private_files.directory(made) == made


def test_a_folder_that_others_may_write_is_refused_with_the_remedy(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(
        BadInput, match=r"folder: everybody may write there \(chmod o-w takes that away\); name another"
    ):
        private_files.directory(folder)
    folder.chmod(0o1777)
    with pytest.raises(BadInput, match="everybody may write there"):
        private_files.directory(folder)
    assert private_files.directory(folder / "within").is_dir(), "what is ours in a sticky folder stays ours"


def test_a_folder_on_the_way_counts(folder: Path) -> None:
    (folder / "within").mkdir()
    folder.chmod(0o777)
    with pytest.raises(BadInput, match=r"folder: everybody may write there"):
        private_files.directory(folder / "within")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused_by_their_name(folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    with pytest.raises(BadInput, match=f"belongs to {pwd.getpwuid(65534).pw_name}"):
        private_files.directory(folder)
    with pytest.raises(BadInput, match="belongs to"):
        private_files.directory(folder / "within")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another group")
def test_a_group_counts_as_others_unless_it_is_ours_alone(folder: Path) -> None:
    folder.chmod(0o775)
    assert private_files.directory(folder) == folder
    os.chown(folder, 0, 65534)
    with pytest.raises(BadInput, match=r"its group may write there \(chmod g-w"):
        private_files.directory(folder)


def test_where_nobody_else_is_a_volume_may_have_any_rights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o2777)
    monkeypatch.setenv(private_files.ALONE, "1")
    assert private_files.directory(folder) == folder


def test_a_link_in_place_of_the_folder_is_refused_and_one_on_the_way_of_ours_is_not(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(BadInput, match="link: is a symbolic link"):
        private_files.directory(link)
    assert private_files.directory(link / "within") == folder / "within"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_link_of_somebody_else_on_the_way_is_refused(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    os.lchown(link, 65534, 65534)
    with pytest.raises(BadInput, match="is a symbolic link of another user's"):
        private_files.directory(link / "within")


def _linked_file(folder: Path, secret: Path) -> None:
    (folder / "a.py").symlink_to(secret)


def _linked_folder(folder: Path, secret: Path) -> None:
    (folder / "a").symlink_to(secret.parent)


def _dangling(folder: Path, secret: Path) -> None:
    del secret
    (folder / "a.py").symlink_to("nowhere")


def _pipe(folder: Path, secret: Path) -> None:
    del secret
    os.mkfifo(folder / "a.py")


@pytest.mark.parametrize(
    ("plant", "name", "why"),
    [
        (_linked_file, "a.py", "is a symbolic link"),
        (_linked_folder, "a/secret.py", "is a symbolic link"),
        (_dangling, "a.py", "is a symbolic link"),
        (_pipe, "a.py", "is no plain file"),
        (_linked_file, "../outside/secret.py", "leaves the folder"),
    ],
)
def test_what_is_no_plain_file_of_the_folder_is_refused_unread(
    folder: Path, secret: Path, plant: Callable[[Path, Path], None], name: str, why: str
) -> None:
    plant(folder, secret)
    with pytest.raises(BadInput, match=why) as refused:
        private_files.read_beneath(folder, name)
    assert SECRET not in str(refused.value)


def test_plain_files_are_read_up_to_a_size(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a").write_bytes(b"12345")
    assert private_files.read_beneath(folder, "sub/a") == b"12345"
    with pytest.raises(BadInput, match="holds 5 bytes; at most 4 are read"):
        private_files.read_beneath(folder, "sub/a", most_bytes=4)
    with pytest.raises(FileNotFoundError):
        private_files.read_beneath(folder, "sub/b")


def test_appending_follows_no_link_and_changes_no_file_of_two_names(folder: Path, secret: Path) -> None:
    (folder / "link").symlink_to(secret)
    (folder / "dangling").symlink_to(folder / "outside")
    os.link(secret, folder / "hard")
    os.mkfifo(folder / "pipe")
    for name, why in {
        "link": "symbolic link",
        "dangling": "symbolic link",
        "hard": "other names",
        "pipe": "plain",
    }.items():
        with pytest.raises(BadInput, match=why):
            private_files.append_to(folder / name)
    assert secret.read_text() == SECRET
    assert not (folder / "outside").exists()
    with private_files.append_to(folder / "new") as file:
        file.write(b"x")
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o600


def test_replacing_replaces_the_link_and_not_what_it_leads_to(folder: Path, secret: Path) -> None:
    (folder / "a").symlink_to(secret)
    private_files.replace(folder / "a", "new")
    assert (folder / "a").read_text() == "new"
    assert not (folder / "a").is_symlink()
    assert secret.read_text() == SECRET
    assert os.listdir(folder) == ["a"]


def _listening(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.parent)  # a socket's address holds 107 bytes
        made.bind(place.name)


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (_listening, "a socket")])
def test_what_is_no_file_is_not_replaced(
    folder: Path, make: Callable[[Path], None], kind: str, is_linked: bool
) -> None:
    make(folder / "a")
    named = folder / "a"
    if is_linked:
        named = folder / "link"
        named.symlink_to("a")
    before = {each: each.lstat() for each in folder.iterdir()}
    with pytest.raises(BadInput, match=f"{named.name}: is {kind}, which no file replaces"):
        private_files.replace(named, "new")
    assert {each: each.lstat() for each in folder.iterdir()} == before


def test_a_directory_is_not_replaced_and_links_to_one_or_to_nothing_are(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "link").symlink_to("a")
    (folder / "dangling").symlink_to("nowhere")
    with pytest.raises(BadInput, match="a: is a directory"):
        private_files.replace(folder / "a", "new")
    for name in ("link", "dangling", "plain", "plain"):
        private_files.replace(folder / name, "new")
    assert sorted(os.listdir(folder)) == ["a", "dangling", "link", "plain"]
    assert [(folder / name).is_file() for name in ("link", "dangling", "plain")] == [True] * 3


def test_a_file_of_ours_is_found_or_made_in_a_folder_of_ours_or_a_sticky_one(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        private_files.own_file(folder / "a")
    for rights in (0o755, 0o1777):
        folder.chmod(rights)
        made = private_files.own_file(folder / f"{rights:o}" / "a", make=True)
        assert private_files.own_file(made) == made
        (folder / f"b{rights:o}").write_text("")
        (folder / f"b{rights:o}").chmod(0o644)
        private_files.own_file(folder / f"b{rights:o}")


@pytest.mark.parametrize(("rights", "why"), [(0o646, "everybody may write"), (0o664, "its group may write")])
def test_a_file_that_others_may_write_is_not_ours(folder: Path, rights: int, why: str) -> None:
    (folder / "a").touch()
    (folder / "a").chmod(rights)
    if os.geteuid() == 0:
        os.chown(folder / "a", 0, 65534)
    with pytest.raises(BadInput, match=f"a: {why} there"):
        private_files.own_file(folder / "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("given", ["a", "."])
def test_a_file_of_somebody_else_or_in_their_folder_is_not_ours(folder: Path, given: str) -> None:
    (folder / "a").touch()
    os.chown(folder / given, 65534, 65534)
    for make in (False, True):
        with pytest.raises(BadInput, match="belongs to"):
            private_files.own_file(folder / "a", make=make)


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/passwd",
        "a/b",
        "x\0y",
        "x\ny",
        ".bashrc",
        "..",
        ".",
        "",
        "-rf",
        "~",
        "x" * 999,
        "ü" * 999,
        "\u202ex",
        "$(x)",
    ],
)
def test_any_name_gives_one_plain_part_of_a_path(name: str) -> None:
    for made in (file_name(name), file_name(name, ".py")):
        assert made == Path(made).name
        assert made[0] not in ".-~"
        assert made.isprintable()
        assert len(made.encode()) <= NAME_BYTES + 3
    assert file_name("soft max", ".py") == "soft_max.py"
    assert file_name("softmax.py", ".py") == "softmax.py"


def test_names_and_paths_of_others_are_checked(tmp_path: Path) -> None:
    del tmp_path
    for name in ("a/b", "../x", "..", "a\nb", "a\0b", "\x1b[31m", "\u202e", "x" * 201):
        with pytest.raises(BadInput, match="is no name"):
            private_files.require_name("the task's name", name)
    for path in ("", ".", "/etc/passwd", "a/../../b", "a\0b", "a\nb", "x" * 300, "a/" * 600 + "b"):
        with pytest.raises(BadInput, match="source path"):
            private_files.relative_path("source path", path)
    assert private_files.relative_path("source path", "package/module.py").parts == ("package", "module.py")
