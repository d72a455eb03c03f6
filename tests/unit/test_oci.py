"""What counts as a name, a digest, a manifest; what a platform filter leaves of an index, to the
byte.
"""

from __future__ import annotations

import json

import pytest

from _regsync.config import Config, registry_for
from _regsync.errors import ConfigError, ContentError
from _regsync.oci import (
    ACCEPT_MANIFESTS,
    Descriptor,
    Platform,
    Reference,
    check_digest,
    digest_of,
    extend_referrers_list,
    full_name,
    is_referrer_tag,
    is_repository,
    is_tag,
    parse_manifest,
    parse_platform,
    parse_reference,
    platform_matches,
    referrers_tag,
    split_digest,
    split_full_name,
    trim_index,
)

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
NONDISTRIBUTABLE = "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+prettyjws"
HEX = "0123456789abcdef" * 4


def digest(number, algorithm="sha256"):
    return digest_of(str(number).encode(), algorithm)


def entry(number=1, media_type=LAYER, **fields):
    return {"mediaType": media_type, "digest": digest(number), "size": number, **fields}


def image(*layers, **fields):
    return {"schemaVersion": 2, "config": entry(0, CONFIG), "layers": list(layers), **fields}


def child(number, platform, **fields):
    if platform is not None:
        names = ("os", "architecture", "variant")
        fields["platform"] = dict(zip(names, platform.split("/"), strict=False))
    return entry(number, MANIFEST, **fields)


def attestation(number, of):
    annotations = {"vnd.docker.reference.digest": digest(of)}
    return child(number, "unknown/unknown", annotations=annotations)


def index(*entries, **fields):
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(entries), **fields}


def parse(document, content_type=None, **options):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_manifest(body, content_type=content_type, **options)


def refused(document, content_type=None, **options):
    """Return the one line of the refusal, after checking that it is one."""
    with pytest.raises(ContentError) as caught:
        parse(document, content_type, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value)


# Names and digests.

REPOSITORIES = ["a", "library/alpine", "a.b_c__d---e/f", "0/1", "a" * 255]
NO_REPOSITORIES = ["", "A", "a/", "/a", "a//b", "a..b", "a___b", "-a", "a-", "a b", "a\n", "é", "a" * 256]  # fmt: skip
TAGS = ["latest", "_", "1.2-x_Y", "a" * 128]
NO_TAGS = ["", ".a", "-a", "a:b", "a/b", "a\n", "é", "a" * 129]
ENDS = ("", ".sig", ".att", ".sbom")
REFERRER_TAGS = [f"{kind}-{HEX}{end}" for kind in ("sha256", "sha512") for end in ENDS]
IMAGE_TAGS = ["sha256-abc", f"sha256-{HEX}.txt", f"v1-sha256-{HEX}", f"sha256-{HEX.upper()}"]


@pytest.mark.parametrize(
    ("is_one", "names", "others"),
    [
        (is_repository, REPOSITORIES, NO_REPOSITORIES),
        (is_tag, TAGS, NO_TAGS),
        (is_referrer_tag, REFERRER_TAGS, IMAGE_TAGS),
    ],
    ids=["repository", "tag", "referrer tag"],
)
def test_names_are_known(is_one, names, others):
    assert [name for name in names if not is_one(name)] == []
    assert [name for name in others if is_one(name)] == []


@pytest.mark.parametrize("text", [f"sha256:{HEX}", f"sha512:{HEX}{HEX}"])
def test_a_digest_is_returned_unchanged(text):
    assert check_digest(text) == text
    assert ":".join(split_digest(text)) == text
    assert referrers_tag(text) == f"{text[:6]}-{HEX}", "cut to what a tag may be"


NO_DIGESTS = ["", HEX, f"sha256:{HEX[1:]}", f"sha256:{HEX}0", f"sha512:{HEX}", f"sha256:{HEX.upper()}",
    f"sha256:{HEX}\n", f"sha256:../{HEX[3:]}"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "is not a digest") for text in NO_DIGESTS),
        (f"blake3:{HEX}", "digests of blake3 cannot be verified here"),
    ],
)
def test_a_digest_is_refused(text, words):
    with pytest.raises(ContentError, match=words):
        check_digest(text)


# References.


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("alpine", ("docker.io", "alpine")),
        ("library/alpine:3.20", ("docker.io", "library/alpine", "3.20")),
        (f"alpine@sha256:{HEX}", ("docker.io", "alpine", None, f"sha256:{HEX}")),
        ("index.docker.io/library/alpine", ("index.docker.io", "library/alpine")),
        ("LocalHost:5000/a/b:B", ("localhost:5000", "a/b", "B")),
        (f"[2001:DB8::1]:5000/a@sha256:{HEX}", ("[2001:db8::1]:5000", "a", None, f"sha256:{HEX}")),
        ("example.com/" + "a" * 255, ("example.com", "a" * 255)),
        ("https://localhost:5811/app:v1", ("https://localhost:5811", "app", "v1")),
        ("http://registry/app", ("http://registry", "app")),
    ],
)
def test_a_reference_is_read_and_may_name_its_scheme(text, parts):
    reference = parse_reference(text)
    assert reference == Reference(*parts)
    assert parse_reference(str(reference)) == reference
    found = registry_for(reference.registry, Config({}, ()))
    assert "://" not in text or f"{found.scheme}://{found.authority}" == reference.registry


# By the words of the refusal, what is refused.
NO_REFERENCES = {
    "write HOST/REPOSITORY": ["", "https://alpine", "localhost:5000"],
    "leave out 'oci://'": ["oci://example.com/a"],
    "'' is not a repository": ["example.com/:a"],
    "is not a repository": ["/a", "a\x1b[2J"],
    "is not a repository (lower case": ["example.com/A/b"],
    "'oci-layout:d//A:b': 'A' is not": ["oci-layout:d//A:b"],
    "'' is not a tag": ["a:"],
    "'b:c' is not a tag": ["a:b:c"],
    "is not a tag": ["a:" + "b" * 129],
    "is not a digest": ["a@sha256:abc"],
    "cannot be verified": [f"a@blake3:{HEX}"],
    "leave out the tag": [f"a:b@sha256:{HEX}"],
    "'-a.com' is not a registry address": ["-a.com/b"],
    "nothing behind it, or oci-layout:PATH": ["oci:/disk/app:v1", "./disk/app"],
    "cannot hold a user name or password": ["https://me:secret@example.com/a", "me:secret@example.com/a:b"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"), [(text, words) for words, texts in NO_REFERENCES.items() for text in texts]
)
def test_a_reference_is_refused_with_a_remedy(text, words):
    """Addresses are those of the configuration, which unit/test_config.py has."""
    with pytest.raises(ConfigError) as caught:
        registry_for(parse_reference(text).registry, Config({}, ()))
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("registry.example.com:5000", "team/app:v1"),
        ("oci-layout:./usb", "team/app:v1"),
        ("oci-layout:/media//disk", "app"),
    ],
)
def test_a_full_name_is_split_where_it_was_joined(host, name):
    assert split_full_name(full_name(host, name)) == (host, name)


# Platforms.


@pytest.mark.parametrize("text", ["linux/amd64", "Linux/ARM/v7", "a/b.c"])
def test_a_platform_is_read_and_lower_cased(text):
    assert str(parse_platform(text)) == text.lower()


@pytest.mark.parametrize("text", ["", "linux", "linux/", "/amd64", "a/b/", "a/b/c/d", "a b/c", "a/b\n"])  # fmt: skip
def test_a_platform_is_refused(text):
    with pytest.raises(ValueError, match=r"OS/ARCH\[/VARIANT\]"):
        parse_platform(text)


@pytest.mark.parametrize(
    ("wanted", "taken", "left_out"),
    [
        ("linux/amd64", "linux/amd64 linux/amd64/v3", "windows/amd64 linux/386"),
        ("linux/amd64/v3", "linux/amd64/v3", "linux/amd64"),
        ("linux/arm64", "linux/arm64 linux/arm64/v8", "linux/arm"),
        ("linux/arm64/v8", "linux/arm64", "linux/arm64/v9"),
        ("linux/arm", "linux/arm/v6", "linux/arm64"),
        ("linux/arm/v7", "linux/arm", "linux/arm/v6"),
    ],
)
def test_a_platform_matches_its_variants(wanted, taken, left_out):
    for have in taken.split():
        assert platform_matches(parse_platform(wanted), parse_platform(have)), have
    for have in left_out.split():
        assert not platform_matches(parse_platform(wanted), parse_platform(have)), have


# Manifests.


def test_accept_names_the_four_types_and_not_schema_1():
    assert set(ACCEPT_MANIFESTS.split(", ")) == {INDEX, LIST, MANIFEST, DOCKER}


@pytest.mark.parametrize(
    ("document", "media_type"),
    [
        (image(), MANIFEST),
        (image(mediaType=DOCKER), DOCKER),
        (index(mediaType=LIST), LIST),
        ({"manifests": []}, INDEX),
        ({"mediaType": "application/vnd.example.thing+json"}, "application/vnd.example.thing+json"),
    ],
    ids=["image", "docker-image", "docker-list", "bare-index", "unknown"],
)
def test_document_decides_when_the_header_says_nothing(document, media_type):
    for header in (None, "", "application/json", "text/plain", "application/octet-stream"):
        assert parse(document, header).media_type == media_type


def test_header_decides_when_the_document_says_nothing():
    assert parse(image(), f"{DOCKER.upper()}; charset=utf-8").media_type == DOCKER
    assert parse(index() | {"manifests": None}, INDEX).is_index, "Go wrote null"


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_bytes_are_kept_verbatim_and_a_digest_is_checked_with_its_own_algorithm(algorithm):
    body = b' {"config" : %s,\n "unknown": 1.50, "layers":null}\n' % json.dumps(entry()).encode()
    good, wrong = digest_of(body, algorithm), digest(1, algorithm)
    manifest = parse(body, MANIFEST, digest=good)
    assert (manifest.body, manifest.size, manifest.digest) == (body, len(body), good)
    told = refused(body, digest=wrong)
    assert f"asked for {wrong}, got {good}; received no content type" in told


def test_a_manifest_is_held_against_the_index_entry():
    body = json.dumps(image()).encode()
    good = Descriptor(media_type=DOCKER, digest=digest_of(body), size=len(body))
    assert parse(body, "text/plain", expected=good).media_type == DOCKER
    assert f"different types ({MANIFEST}, {DOCKER})" in refused(body, MANIFEST, expected=good)
    longer = good._replace(size=good.size + 1)
    assert "got sha256:" in refused(body + b" ", expected=longer)
    assert "the index says 1" in refused(body, expected=good._replace(size=1))


def test_an_image_is_read_whole():
    manifest = parse(
        image(
            entry(1),
            entry(2),
            annotations={"a": "b", "null": None, "number": 3},
            subject=entry(9, MANIFEST),
            artifactType="application/a",
        )
    )
    assert not manifest.is_index
    assert manifest.config == Descriptor(media_type=CONFIG, digest=digest(0), size=0)
    assert [layer.size for layer in manifest.layers] == [1, 2]
    assert (manifest.annotations, manifest.subject.digest) == ({"a": "b"}, digest(9))
    assert manifest.artifact_type == "application/a"
    assert (parse(image()).artifact_type, parse(index()).artifact_type) == (CONFIG, None)


def test_blobs_are_config_then_layers_once_and_without_foreign_ones():
    """By their type, whatever URLs they have."""
    urls = {"urls": ["https://example.com/a"]}
    foreign = (entry(4, FOREIGN), entry(5, NONDISTRIBUTABLE, **urls))
    layers = (entry(3, **urls), *foreign, entry(2), entry(3, "text/x"), entry(0))
    found = [(blob.size, blob.media_type) for blob in parse(image(*layers)).blobs]
    assert found == [(0, CONFIG), (3, LAYER), (2, LAYER)]


def test_unknown_and_old_things_are_tolerated():
    document = index(entry(1, "application/vnd.future+json", extra=[{}]), extra={"manifests": 1.5})
    assert [each.media_type for each in parse(document).children] == ["application/vnd.future+json"]
    assert parse({"mediaType": "application/x", "layers": [entry(1)]}).layers[0].size == 1
    old = {"mediaType": "application/vnd.cncf.oras.artifact.manifest.v1+json", "blobs": [entry(1)]}
    assert [blob.digest for blob in parse(old, old["mediaType"]).blobs] == [digest(1)]


@pytest.mark.parametrize("platform", [None, {}, {"os": "", "architecture": ""}, {"os": "a b"}])
def test_a_platform_that_nobody_can_ask_for_is_none(platform):
    assert parse(index(entry(1, MANIFEST, platform=platform))).children[0].platform is None


@pytest.mark.parametrize(
    ("data", "content"), [("W10=", b"[]"), ("W10", None), ("", None), ("é", None)]
)
def test_embedded_data_is_what_its_base64_says_or_none(data, content):
    assert parse(image(entry(data=data))).layers[0].data == content


def test_nesting_of_64_passes_whatever_strings_hold():
    deep = '{"mediaType":"application/x","[[\\"[[\\\\":' + "[" * 63 + "]" * 63
    deep += ', "b": "' + "[{" * 100 + '"}'
    assert parse(deep.encode()).media_type == "application/x"
    assert "nests deeper" in refused(deep.replace("]", "]]", 1).replace(":[", ":[[", 1).encode())


LISTS, OBJECTS, MIXED = b"[" * 100_000, b'{"a":' * 100_000, b'[{"a\\\\\\"":' * 100_000
WRONG_DOCUMENTS = {
    "received no content type, beginning '<!DOCTYPE html> <html>'": [b"<!DOCTYPE html>\n<html>"],
    "received no content type, no body": [b""],
    "beginning ']0;x'": [b"\x1b]0;x\x07"],
    "not JSON": [json.dumps(image()).encode()[:-1], b"{} {}", b'{"a": "\xff"}', b"\xef\xbb\xbf{}",
        json.dumps(image()).encode("utf-16"), b'{"a": ' + b"9" * 5000 + b"}"],
    "the number NaN": [b'{"a": NaN}'],
    "the key 'layers' twice": [b'{"layers": [], "layers": []}'],
    "nests deeper than 64": [b'{"x":' + LISTS, b'{"x":' + OBJECTS, b'{"x":' + MIXED,
        b'{"x":' + LISTS + b"]" * 100_000 + b"}", OBJECTS + b"1" + b"}" * 100_000],
    "not an object": [b"[]", image() | {"layers": [1]}, image(subject=[])],
    "neither a manifest nor an index": [b"{}", image(mediaType="application/a\r\nb: c")],
    "both a manifest and an index": [index(config=entry()), {"manifests": [], "layers": []}],
    "schema 1": [{"schemaVersion": 1, "fsLayers": []}],
    "does not have the fields": [image(mediaType=DOCKER) | {"config": None}],
    "'layers' is not a list": [image() | {"layers": {}}],
    "more than 10000 blobs": [image() | {"layers": [0] * 10_001}],
    "'mediaType' is not a string": [image(mediaType=1)],
    "'annotations' is not an object": [image(annotations=[])],
    "'platform' is not an object": [index(entry(platform="linux"))],
    "layers[0]: '' is not a media type": [image(entry(mediaType=None))],
    "layers[1]: 'sha256:../' is not a digest": [image(entry(), entry(digest="sha256:../"))],
    **{f"layers[0]: {size} is not a size": [image(entry(size=size))] for size in (None, -1, True, 2**63)},
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG_DOCUMENTS)
def test_a_document_is_refused(words):
    for document in WRONG_DOCUMENTS[words]:
        assert words in refused(document)


@pytest.mark.parametrize(
    ("content_type", "document", "words"),
    [
        (MANIFEST, index(), f"different types ({INDEX}, {MANIFEST}); received {MANIFEST}"),
        (MANIFEST, {"manifests": []}, "does not have the fields"),
        ("text/html", image(), "neither a manifest nor an index; received text/html"),
        ("application/a\x1b[2J", image(), "received application/a[2j"),
        (SCHEMA_1, {}, "schema 1"),
    ],
)
def test_header_and_document_disagree(content_type, document, words):
    assert words in refused(document, content_type)


def test_schema_1_is_told_before_its_digest_fails():
    assert "schema 1" in refused({"schemaVersion": 1}, "application/json", digest=digest(1))


# Trimming.

AMD64, ARM64 = Platform("linux", "amd64"), Platform("linux", "arm64")


def test_a_trimmed_index_has_these_bytes():
    source = r"""{
      "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
      "manifests": [
        {"digest": "%s", "mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 1,
         "platform": {"os": "linux", "architecture": "amd64", "os.features": ["\u00e9<&>\u2028\/"]}},
        {"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 2, "digest": "%s",
         "platform": {"architecture": "arm64", "os": "linux"}}
      ],
      "annotations": {"z": "1", "a": "\u007f\n🐳"}, "n": [9007199254740993, -1, true, null]
    }"""
    trimmed = trim_index(parse((source % (digest(1), digest(2))).encode()), [AMD64]).manifest
    assert (
        trimmed.body.decode()
        == '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":['
        '{"digest":"sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b",'
        '"mediaType":"application/vnd.oci.image.manifest.v1+json","size":1,"platform":{"os":"linux",'
        '"architecture":"amd64","os.features":["é<&>\u2028/"]}}],"annotations":{"z":"1","a":"\x7f\\n🐳"},'
        '"n":[9007199254740993,-1,true,null]}'
    )
    assert (
        trimmed.digest == "sha256:fb07c4bd1cf2befe07f26393fb8e0adfa7ec351a9bcf76bf2acab41f59fdcae4"
    )


def test_nothing_is_written_anew_when_nothing_drops():
    source = parse(b' {"manifests": [%s], "x": 1.0}' % json.dumps(child(1, "linux/amd64")).encode())
    trimmed = trim_index(source, [AMD64, ARM64])
    assert trimmed.manifest is source
    assert trimmed.matched == {AMD64}


def kept(document, *wanted):
    trimmed = trim_index(parse(document), [parse_platform(text) for text in wanted])
    return [each.size for each in trimmed.manifest.children] if trimmed.matched else []


PLATFORMS = [
    "linux/amd64", "linux/arm", "linux/arm/v6", "linux/arm64", "windows/amd64", "windows/amd64", None,
    "unknown/unknown",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [
        (["linux/amd64"], [1]),
        (["linux/arm"], [2, 3]),
        (["windows/amd64"], [5, 6]),
        (["linux/arm64", "linux/amd64"], [1, 4]),
        (["plan9/amd64"], []),
    ],
    ids=str,
)
def test_entries_are_kept_in_their_order(wanted, sizes):
    entries = [child(number, text) for number, text in enumerate(PLATFORMS, 1)]
    assert kept(index(*entries), *wanted) == sizes


def test_attestations_follow_their_child_wherever_they_stand():
    images = (child(1, "linux/amd64"), child(2, "linux/arm64"))
    document = index(attestation(3, of=1), *images, attestation(4, of=2))
    assert kept(document, "linux/amd64") == [3, 1]
    assert kept(document, "linux/amd64", "linux/arm64") == [3, 1, 2, 4]
    assert kept(document, "unknown/unknown") == []


def test_of_two_entries_for_one_digest_only_the_wanted_one_stays():
    """Some images run on several platforms as they are."""
    source = parse(index(*(child(1, text) for text in ("linux/arm64", "linux/amd64"))))
    trimmed = trim_index(source, [AMD64]).manifest
    assert [each.platform for each in trimmed.children] == [AMD64]
    (entry,) = json.loads(trimmed.body)["manifests"]
    assert entry["platform"]["architecture"] == "amd64"


@pytest.mark.parametrize(
    ("extra", "words"),
    [("1.0", "number 1.0"), ("1e2", "number 1e2"), ('"\\ud800"', "lone surrogate")],
)
def test_an_index_that_would_not_survive_is_refused_only_when_it_changes(extra, words):
    text = json.dumps(index(child(1, "linux/amd64"), child(2, "linux/arm64"), x=0))
    source = parse(text.replace('"x": 0', f'"x": {extra}').encode())
    assert trim_index(source, [AMD64, ARM64]).manifest is source
    with pytest.raises(ContentError, match=words):
        trim_index(source, [AMD64])
    with pytest.raises(ContentError, match=words):
        extend_referrers_list(source, source.children)


def test_a_list_of_referrers_is_extended_with_whole_entries():
    held = parse(index(child(1, "linux/amd64"), x=1))
    more = Descriptor(MANIFEST, digest(2), 2, artifact_type="a/b", annotations={"k": "v"})
    fields = {"artifactType": "a/b", "annotations": {"k": "v"}}
    entries = [child(1, "linux/amd64"), child(2, None, **fields)]
    assert json.loads(extend_referrers_list(held, [more]).body) == index(*entries, x=1)
    assert json.loads(extend_referrers_list(None, [more]).body) == index(entries[1])
    empty = parse({**index(), "manifests": None})
    assert json.loads(extend_referrers_list(empty, [more]).body) == index(entries[1])
