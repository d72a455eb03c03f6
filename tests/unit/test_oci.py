"""What counts as a name, a digest, a manifest; what a platform filter leaves of an index, to the
byte.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.config import Config, registry_for
from _regsync.errors import ConfigError, ContentError
from _regsync.oci import (
    ACCEPT_MANIFESTS,
    Descriptor,
    Manifest,
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
HEX = "0123456789abcdef" * 4


def digest(number: int, algorithm: str = "sha256") -> str:
    return digest_of(str(number).encode(), algorithm)


def entry(number: int = 1, media_type: str = LAYER, **fields: object) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(number), "size": number, **fields}


def image(*layers: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"schemaVersion": 2, "config": entry(0, CONFIG), "layers": list(layers), **fields}


def child(
    number: int, platform: str | None, media_type: str = MANIFEST, **fields: object
) -> dict[str, Any]:
    if platform is not None:
        fields["platform"] = dict(
            zip(("os", "architecture", "variant"), platform.split("/"), strict=False)
        )
    return entry(number, media_type, **fields)


def attestation(number: int, of: int) -> dict[str, Any]:
    annotations = {
        "vnd.docker.reference.digest": digest(of),
        "vnd.docker.reference.type": "attestation-manifest",
    }
    return child(number, "unknown/unknown", annotations=annotations)


def index(*entries: object, **fields: object) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(entries), **fields}


def parse(document: object, content_type: str | None = None, **options: Any) -> Manifest:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_manifest(body, content_type=content_type, **options)


def refused(document: object, content_type: str | None = None, **options: Any) -> str:
    """Return the one line of the refusal, after checking that it is one."""
    with pytest.raises(ContentError) as caught:
        parse(document, content_type, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value)


# --- names and digests


@pytest.mark.parametrize("name", ["a", "library/alpine", "a.b_c__d---e/f", "0/1", "a" * 255])
def test_repository_is_a_name(name: str) -> None:
    assert is_repository(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "A", "a/", "/a", "a//b", "a..b", "a___b", "-a", "a-", "a b", "a\n", "é", "../a",
        "a" * 256,
    ],
)  # fmt: skip
def test_repository_is_not_a_name(name: str) -> None:
    assert not is_repository(name)


@pytest.mark.parametrize("tag", ["latest", "_", "1.2-x_Y", "a" * 128])
def test_tag_is_one(tag: str) -> None:
    assert is_tag(tag)


@pytest.mark.parametrize("tag", ["", ".a", "-a", "a:b", "a/b", "a\n", "é", "a" * 129])
def test_tag_is_not_one(tag: str) -> None:
    assert not is_tag(tag)


@pytest.mark.parametrize("text", [f"sha256:{HEX}", f"sha512:{HEX}{HEX}"])
def test_digest_is_returned_unchanged(text: str) -> None:
    assert check_digest(text) == text
    assert ":".join(split_digest(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "is not a digest", id="empty"),
        pytest.param(HEX, "is not a digest", id="no-algorithm"),
        pytest.param(f"sha256:{HEX[1:]}", "is not a digest", id="short"),
        pytest.param(f"sha256:{HEX}0", "is not a digest", id="long"),
        pytest.param(f"sha512:{HEX}", "is not a digest", id="sha512-too-short"),
        pytest.param(f"sha256:{HEX.upper()}", "is not a digest", id="upper-case"),
        pytest.param(f"sha256:{HEX}\n", "is not a digest", id="newline"),
        pytest.param(f"sha256:../{HEX[3:]}", "is not a digest", id="path"),
        pytest.param(f"blake3:{HEX}", "digests of blake3 cannot be verified here", id="blake3"),
        pytest.param(
            "md5:d41d8cd98f00b204e9800998ecf8427e", "digests of md5 cannot be verified", id="md5"
        ),
    ],
)
def test_digest_is_refused(text: str, words: str) -> None:
    with pytest.raises(ContentError, match=words):
        check_digest(text)


def test_accept_names_the_four_types_and_not_schema_1() -> None:
    assert set(ACCEPT_MANIFESTS.split(", ")) == {INDEX, LIST, MANIFEST, DOCKER}


def test_fallback_tag_is_cut_to_what_a_tag_may_be() -> None:
    assert referrers_tag(f"sha256:{HEX}") == f"sha256-{HEX}"
    assert referrers_tag(f"sha512:{HEX}{HEX}") == f"sha512-{HEX}"


@pytest.mark.parametrize("end", ["", ".sig", ".att", ".sbom"])
def test_referrer_tag_is_known(end: str) -> None:
    assert is_referrer_tag(f"sha256-{HEX}{end}")
    assert is_referrer_tag(f"sha512-{HEX}{end}")


@pytest.mark.parametrize(
    "tag", ["sha256-abc", f"sha256-{HEX}.txt", f"v1-sha256-{HEX}", f"sha256-{HEX.upper()}"]
)
def test_image_tag_is_no_referrer_tag(tag: str) -> None:
    assert not is_referrer_tag(tag)


# --- references

REFERENCES = [
    ("alpine", "docker.io", "alpine", None, None),
    ("alpine:3.20", "docker.io", "alpine", "3.20", None),
    ("library/alpine:3.20", "docker.io", "library/alpine", "3.20", None),
    (f"alpine@sha256:{HEX}", "docker.io", "alpine", None, f"sha256:{HEX}"),
    ("docker.io/alpine", "docker.io", "alpine", None, None),
    ("index.docker.io/library/alpine", "index.docker.io", "library/alpine", None, None),
    ("localhost/a", "localhost", "a", None, None),
    ("LOCALHOST/a", "localhost", "a", None, None),
    ("LocalHost:5000/a:B", "localhost:5000", "a", "B", None),
    ("localhost:5000/a/b:c", "localhost:5000", "a/b", "c", None),
    ("registry:5000/a", "registry:5000", "a", None, None),
    ("Registry.Example.COM/a:B", "registry.example.com", "a", "B", None),
    ("127.0.0.1:5000/a", "127.0.0.1:5000", "a", None, None),
    ("[::1]/a", "[::1]", "a", None, None),
    (f"[2001:DB8::1]:5000/a@sha256:{HEX}", "[2001:db8::1]:5000", "a", None, f"sha256:{HEX}"),
    ("example.com/" + "a" * 255, "example.com", "a" * 255, None, None),
]


@pytest.mark.parametrize(
    ("text", "host", "repository", "tag", "digest"),
    REFERENCES,
    ids=[row[0][:40] for row in REFERENCES],
)
def test_reference_is_read(
    text: str, host: str, repository: str, tag: str | None, digest: str | None
) -> None:
    reference = parse_reference(text)
    assert reference == Reference(host, repository, tag, digest)
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    ("text", "registry", "repository"),
    [
        ("https://localhost:5811/app:v1", "https://localhost:5811", "app"),
        ("http://registry.example.com/a/b", "http://registry.example.com", "a/b"),
        ("HTTPS://Example.com/a", "https://example.com", "a"),
        ("http://registry/app", "http://registry", "app"),
        (f"https://[::1]/a@sha256:{HEX}", "https://[::1]", "a"),
    ],
)
def test_reference_may_name_its_scheme(text: str, registry: str, repository: str) -> None:
    reference = parse_reference(text)
    assert (reference.registry, reference.repository) == (registry, repository)
    assert parse_reference(str(reference)) == reference
    found = registry_for(reference.registry, Config({}, ()))
    assert f"{found.scheme}://{found.authority}" == registry


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "write HOST/REPOSITORY", id="empty"),
        pytest.param("https://alpine", "write HOST/REPOSITORY", id="https-without-host"),
        pytest.param("http://", "'' is not a host", id="http-alone"),
        pytest.param("https://http://a/b", "write NAME[:PORT]", id="two-schemes"),
        pytest.param("oci://example.com/a", "leave out 'oci://'", id="other-scheme"),
        pytest.param("docker://alpine", "leave out 'docker://'", id="docker-scheme"),
        pytest.param("example.com", "write HOST/REPOSITORY", id="host-alone"),
        pytest.param("localhost:5000", "write HOST/REPOSITORY", id="localhost-alone"),
        pytest.param("example.com/", "write HOST/REPOSITORY", id="host-and-slash"),
        pytest.param("example.com/:a", "'' is not a repository", id="no-repository"),
        pytest.param("a//b", "is not a repository", id="empty-part"),
        pytest.param("/a", "is not a repository", id="leading-slash"),
        pytest.param("a/", "is not a repository", id="trailing-slash"),
        pytest.param("example.com/A/b", "is not a repository (lower case", id="upper-case-repository"),
        pytest.param("a b", "is not a repository", id="blank"),
        pytest.param("a\x1b[2J", "is not a repository", id="escape"),
        pytest.param("example.com/a?b=c", "is not a repository", id="query"),
        pytest.param("example.com/" + "a" * 256, "is not a repository", id="too-long"),
        pytest.param("a:", "'' is not a tag", id="empty-tag"),
        pytest.param("a:-b", "'-b' is not a tag", id="bad-tag"),
        pytest.param("a:b:c", "'b:c' is not a tag", id="two-tags"),
        pytest.param("a:" + "b" * 129, "is not a tag", id="long-tag"),
        pytest.param("a@", "is not a digest", id="empty-digest"),
        pytest.param("a@sha256:abc", "is not a digest", id="short-digest"),
        pytest.param(f"a@blake3:{HEX}", "cannot be verified", id="blake3"),
        pytest.param(f"a:b@sha256:{HEX}", "leave out the tag", id="tag-and-digest"),
        pytest.param("::1/a", "or [IPV6][:PORT]", id="bare-ipv6"),
        pytest.param("[::1/a", "or [IPV6][:PORT]", id="open-bracket"),
        pytest.param("[fe80::1%eth0]/a", "or [IPV6][:PORT]", id="zone"),
        pytest.param("[zz]/a", "'[zz]/a' is not a repository", id="no-address"),
        pytest.param("[1.2.3.4]/a", "is not a registry address", id="ipv4-in-brackets"),
        pytest.param("example.com:/a", "write NAME[:PORT]", id="empty-port"),
        pytest.param("example.com:0/a", "is not a registry address", id="port-0"),
        pytest.param("example.com:65536/a", "is not a registry address", id="port-too-high"),
        pytest.param("example.com:٣/a", "write NAME[:PORT]", id="foreign-digits"),
        pytest.param("-a.com/b", "'-a.com' is not a host", id="bad-host"),
        pytest.param("a..b/c", "'a..b' is not a registry address", id="empty-label"),
        pytest.param("a_b.c/d", "'a_b.c' is not a host", id="underscore"),
        pytest.param("oci-layout:d//A:b", "'oci-layout:d//A:b': 'A' is not", id="in-layout"),
    ],
)  # fmt: skip
def test_reference_is_refused_with_a_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        # As `copy` reads it: one grammar of addresses, for references and for the configuration's
        # URLs.
        registry_for(parse_reference(text).registry, Config({}, ()))
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["https://me:secret@example.com/a", "me:secret@example.com/a:b"])
def test_reference_with_a_password_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot hold a user name or password") as caught:
        parse_reference(text)
    assert "secret" not in str(caught.value)


@given(st.text(max_size=80))
def test_any_text_is_a_reference_or_a_config_error(text: str) -> None:
    try:
        reference = parse_reference(text)
    except ConfigError as error:
        shown = str(error)
    else:
        shown = str(reference)
        assert parse_reference(shown) == reference
    assert "\n" not in shown


@given(
    st.from_regex(r"[a-z0-9]{1,9}(\.[a-z]{2,5}){1,2}(:[1-9][0-9]{0,3})?", fullmatch=True),
    st.from_regex(
        r"[a-z0-9]{1,5}([._-][a-z0-9]{1,5})?(/[a-z0-9]{1,5}(__|--)[a-z]){0,3}", fullmatch=True
    ),
    st.from_regex(rf"(:[A-Za-z0-9_][\w.-]{{0,9}}|@sha256:{HEX})?", fullmatch=True).filter(
        str.isascii
    ),
)
def test_reference_survives_the_round_trip(host: str, repository: str, end: str) -> None:
    assert str(parse_reference(f"{host}/{repository}{end}")) == f"{host}/{repository}{end}"


# --- platforms


@pytest.mark.parametrize(
    ("text", "shown"),
    [("linux/amd64", "linux/amd64"), ("Linux/ARM/v7", "linux/arm/v7"), ("a/b.c", "a/b.c")],
)
def test_platform_is_read_and_lower_cased(text: str, shown: str) -> None:
    assert str(parse_platform(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "all", "linux", "linux/", "/amd64", "a/b/", "a/b/c/d", "a b/c", "a/b\n"]
)
def test_platform_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"OS/ARCH\[/VARIANT\]"):
        parse_platform(text)


@pytest.mark.parametrize(
    ("wanted", "have", "matches"),
    [
        ("linux/amd64", "linux/amd64", True),
        ("linux/amd64", "linux/amd64/v3", True),
        ("linux/amd64/v3", "linux/amd64", False),
        ("linux/amd64", "windows/amd64", False),
        ("linux/amd64", "linux/386", False),
        ("linux/arm64", "linux/arm64", True),
        ("linux/arm64", "linux/arm64/v8", True),
        ("linux/arm64/v8", "linux/arm64", True),
        ("linux/arm64/v9", "linux/arm64", False),
        ("linux/arm64/v8", "linux/arm64/v9", False),
        ("linux/arm", "linux/arm/v6", True),
        ("linux/arm/v7", "linux/arm", True),
        ("linux/arm/v6", "linux/arm", False),
        ("linux/arm", "linux/arm64", False),
    ],
)
def test_platform_matches(wanted: str, have: str, matches: bool) -> None:
    assert platform_matches(parse_platform(wanted), parse_platform(have)) is matches


# --- manifests


@pytest.mark.parametrize(
    "content_type", [None, "", "application/json", "text/plain", "application/octet-stream"]
)
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
def test_document_decides_when_the_header_says_nothing(
    content_type: str | None, document: dict[str, Any], media_type: str
) -> None:
    assert parse(document, content_type).media_type == media_type


def test_header_decides_when_the_document_says_nothing() -> None:
    assert parse(image(), f"{DOCKER.upper()}; charset=utf-8").media_type == DOCKER


def test_bytes_are_kept_verbatim() -> None:
    body = (
        b' {"config" : ' + json.dumps(entry()).encode() + b',\n "unknown": 1.50, "layers":null}\n'
    )
    manifest = parse(body, MANIFEST)
    assert manifest.body == body
    assert manifest.size == len(body)
    assert manifest.digest == digest_of(body)


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_digest_is_checked_with_its_own_algorithm(algorithm: str) -> None:
    body = json.dumps(image()).encode()
    good = digest_of(body, algorithm)
    assert parse(body, digest=good).digest == good
    wrong = digest(1, algorithm)
    assert f"asked for {wrong}, got {good}; received no content type" in refused(body, digest=wrong)


def test_image_is_read_whole() -> None:
    annotations = {"a": "b", "null": None, "number": 3}
    fields = {
        "annotations": annotations,
        "subject": entry(9, MANIFEST),
        "artifactType": "application/a",
    }
    manifest = parse(image(entry(1), entry(2), **fields))
    assert not manifest.is_index
    assert manifest.config == Descriptor(media_type=CONFIG, digest=digest(0), size=0)
    assert [layer.size for layer in manifest.layers] == [1, 2]
    assert manifest.annotations == {"a": "b"}
    assert manifest.subject is not None
    assert manifest.subject.digest == digest(9)
    assert manifest.artifact_type == "application/a"


def test_artifact_type_falls_back_to_the_config() -> None:
    assert parse(image()).artifact_type == CONFIG
    assert parse(index()).artifact_type is None


def test_blobs_are_config_then_layers_once_and_without_foreign_ones() -> None:
    manifest = parse(image(entry(3), entry(4, FOREIGN), entry(2), entry(3, "text/x"), entry(0)))
    assert [(blob.size, blob.media_type) for blob in manifest.blobs] == [
        (0, CONFIG),
        (3, LAYER),
        (2, LAYER),
    ]


@pytest.mark.parametrize(
    ("media_type", "foreign"),
    [
        (LAYER, False),
        (FOREIGN, True),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar", True),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", True),
    ],
)
def test_layer_is_foreign_by_type_whatever_its_urls(media_type: str, foreign: bool) -> None:
    for urls in ({}, {"urls": ["https://example.com/a"]}):
        assert parse(image(entry(1, media_type, **urls))).layers[0].is_foreign is foreign


def test_old_artifact_manifest_has_blobs() -> None:
    media_type = "application/vnd.cncf.oras.artifact.manifest.v1+json"
    manifest = parse(
        {"mediaType": media_type, "blobs": [entry(1)], "subject": entry(2, MANIFEST)}, media_type
    )
    assert [blob.digest for blob in manifest.blobs] == [digest(1)]


def test_unknown_things_are_tolerated() -> None:
    document = index(entry(1, "application/vnd.future+json", extra=[{}]), extra={"manifests": 1.5})
    assert [entry.media_type for entry in parse(document, INDEX).children] == [
        "application/vnd.future+json"
    ]
    assert parse({"mediaType": "application/x", "layers": [entry(1)]}).layers[0].size == 1


@pytest.mark.parametrize(
    "platform", [None, {}, {"os": "", "architecture": ""}, {"os": "a b", "architecture": "c"}]
)
def test_platform_that_nobody_can_ask_for_is_none(platform: object) -> None:
    assert parse(index(entry(1, MANIFEST, platform=platform))).children[0].platform is None


@pytest.mark.parametrize(
    ("data", "content"), [("W10=", b"[]"), ("W10", None), ("", None), ("é", None)]
)
def test_embedded_data_is_what_its_base64_says_or_none(data: str, content: bytes | None) -> None:
    assert parse(image(ENTRY | {"data": data})).layers[0].data == content


def test_index_of_nobody_is_empty_when_go_wrote_null() -> None:
    assert parse(index() | {"manifests": None}, INDEX).is_index


ENTRY = entry()
WRONG_DOCUMENTS = [
    ("html", b"<!DOCTYPE html>\n<html>", "received no content type, beginning '<!DOCTYPE html> <html>'"),
    ("empty", b"", "received no content type, no body"),
    ("truncated", json.dumps(image()).encode()[:-1], "not JSON"),
    ("trailing", b"{} {}", "not JSON"),
    ("not-utf-8", b'{"a": "\xff"}', "not JSON"),
    ("utf-16", json.dumps(image()).encode("utf-16"), "not JSON"),
    ("bom", b"\xef\xbb\xbf{}", "not JSON"),
    ("nan", b'{"a": NaN}', "the number NaN"),
    ("huge-number", b'{"a": ' + b"9" * 5000 + b"}", "the number 999"),
    ("duplicate-key", b'{"layers": [], "layers": []}', "the key 'layers' twice"),
    ("control-characters", b"\x1b]0;x\x07", "beginning ']0;x'"),
    ("list", b"[]", "not an object"),
    ("text", b'"a"', "not an object"),
    ("empty-object", b"{}", "neither a manifest nor an index"),
    ("error-body", b'{"errors": []}', "neither a manifest nor an index"),
    ("both", index(config=ENTRY), "both a manifest and an index"),
    ("both-empty", {"manifests": [], "layers": []}, "both a manifest and an index"),
    ("schema-1", {"schemaVersion": 1, "fsLayers": []}, "schema 1"),
    ("layers-not-a-list", image() | {"layers": {}}, "'layers' is not a list"),
    ("manifests-not-a-list", index() | {"manifests": "a"}, "'manifests' is not a list"),
    ("media-type-not-text", image(mediaType=1), "'mediaType' is not a string"),
    ("media-type-breaks-the-header", image(mediaType="application/a\r\nb: c"), "neither a manifest"),
    ("annotations-not-an-object", image(annotations=[]), "'annotations' is not an object"),
    ("layer-not-an-object", image() | {"layers": [1]}, "layers[0]: not an object"),
    ("no-media-type", image(ENTRY | {"mediaType": None}), "layers[0]: '' is not a media type"),
    ("bad-media-type", image(ENTRY | {"mediaType": "a"}), "layers[0]: 'a' is not a media type"),
    ("no-digest", image(ENTRY | {"digest": None}), "layers[0]: '' is not a digest"),
    ("bad-digest", image(ENTRY, ENTRY | {"digest": "sha256:../"}), "layers[1]: 'sha256:../' is not a digest"),
    ("blake3", image(ENTRY | {"digest": f"blake3:{HEX}"}), "digests of blake3 cannot be verified"),
    ("no-size", image(ENTRY | {"size": None}), "layers[0]: None is not a size"),
    ("negative-size", image(ENTRY | {"size": -1}), "layers[0]: -1 is not a size"),
    ("true-size", image(ENTRY | {"size": True}), "layers[0]: True is not a size"),
    ("fraction-size", image(ENTRY | {"size": 1.0}), "layers[0]: 1.0 is not a size"),
    ("text-size", image(ENTRY | {"size": "1"}), "layers[0]: '1' is not a size"),
    ("size-above-int64", image(ENTRY | {"size": 2**63}), "is not a size"),
    ("data-not-text", image(ENTRY | {"data": 1}), "'data' is not a string"),
    ("platform-not-an-object", index(ENTRY | {"platform": "linux"}), "'platform' is not an object"),
    ("os-not-text", index(ENTRY | {"platform": {"os": 1}}), "'os' is not a string"),
    ("two-sizes", image(ENTRY, ENTRY | {"size": 2}), f"two sizes for {digest(1)}"),
    ("config-null", image(mediaType=DOCKER) | {"config": None}, "does not have the fields"),
    ("subject-wrong", image(subject=[]), "subject: not an object"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "words"),
    [row[1:] for row in WRONG_DOCUMENTS],
    ids=[row[0] for row in WRONG_DOCUMENTS],
)
def test_document_is_refused(document: object, words: str) -> None:
    assert words in refused(document)


@pytest.mark.parametrize(
    ("content_type", "document", "words"),
    [
        pytest.param(MANIFEST, index(), f"different types ({INDEX}, {MANIFEST}); received {MANIFEST}", id="other"),
        pytest.param(MANIFEST, {"manifests": []}, "does not have the fields", id="index-as-image"),
        pytest.param(INDEX, image(), "does not have the fields", id="image-as-index"),
        pytest.param(INDEX, {}, "does not have the fields", id="empty-as-index"),
        pytest.param("text/html", image(), "neither a manifest nor an index; received text/html", id="html"),
        pytest.param("application/a\x1b[2J", image(), "received application/a[2j", id="control-characters"),
        pytest.param("application/vnd.docker.distribution.manifest.v1+prettyjws", {}, "schema 1", id="prettyjws"),
        pytest.param("application/vnd.docker.distribution.manifest.v1+json", {}, "schema 1", id="schema-1"),
    ],
)  # fmt: skip
def test_header_and_document_disagree(
    content_type: str, document: dict[str, Any], words: str
) -> None:
    assert words in refused(document, content_type)


def test_schema_1_is_told_before_its_digest_fails() -> None:
    assert "schema 1" in refused({"schemaVersion": 1}, "application/json", digest=digest(1))


def test_too_many_descriptors_are_refused() -> None:
    assert "more than 10000 blobs" in refused(image() | {"layers": [0] * 10_001})


@pytest.mark.parametrize(
    "opening", [b"[", b'{"a":', b'[{"a\\\\\\"":'], ids=["lists", "objects", "mixed"]
)
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_refused(opening: bytes, closed: bool) -> None:
    closing = {b"[": b"]", b"{": b"}"}
    ends = b"".join(
        closing[bytes([byte])] for byte in reversed(opening) if bytes([byte]) in closing
    )
    body = b'{"x":' + opening * 100_000 + (b"1" + ends * 100_000 + b"}" if closed else b"")
    assert "nests deeper than 64" in refused(body)


def test_nesting_of_64_passes_whatever_strings_hold() -> None:
    deep = (
        '{"mediaType":"application/x","[[\\"[[\\\\":'
        + "[" * 63
        + "]" * 63
        + ', "b": "'
        + "[{" * 100
        + '"}'
    )
    assert parse(deep.encode()).media_type == "application/x"
    assert "nests deeper" in refused(deep.replace("]", "]]", 1).replace(":[", ":[[", 1).encode())


def test_manifest_is_held_against_the_index_entry() -> None:
    body = json.dumps(image()).encode()
    good = Descriptor(media_type=DOCKER, digest=digest_of(body), size=len(body))
    assert parse(body, "text/plain", expected=good).media_type == DOCKER
    assert f"different types ({MANIFEST}, {DOCKER})" in refused(body, MANIFEST, expected=good)
    assert "got sha256:" in refused(
        body + b" ", expected=Descriptor(media_type=DOCKER, digest=good.digest, size=good.size + 1)
    )
    assert "the index says 1" in refused(
        body, expected=Descriptor(media_type=DOCKER, digest=good.digest, size=1)
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "config",
                    "layers",
                    "manifests",
                    "mediaType",
                    "digest",
                    "size",
                    "platform",
                    "data",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()),
    st.none() | st.text(max_size=30),
)
@example(b"{", "\ud800")
def test_any_bytes_are_a_manifest_or_a_content_error(body: bytes, content_type: str | None) -> None:
    try:
        manifest = parse_manifest(body, content_type=content_type)
    except ContentError as error:
        shown = str(error)
    else:
        shown = manifest.media_type
        assert manifest.body == body
    assert "\n" not in shown


# --- trimming

AMD64, ARM64 = Platform("linux", "amd64"), Platform("linux", "arm64")


def test_trimmed_index_has_these_bytes() -> None:
    source = (
        b'{\n  "schemaVersion": 2, "mediaType": "' + INDEX.encode() + b'",\n  "manifests": [\n'
        b'    {"digest": "'
        + digest(1).encode()
        + b'", "mediaType": "'
        + MANIFEST.encode()
        + b'", "size": 1,'
        b' "platform": {"os": "linux", "architecture": "amd64", "os.features": ["\\u00e9<&>\\u2028\\/"]}},\n'
        b'    {"mediaType": "'
        + MANIFEST.encode()
        + b'", "size": 2, "digest": "'
        + digest(2).encode()
        + b'",'
        b' "platform": {"architecture": "arm64", "os": "linux"}}\n'
        b'  ],\n  "annotations": {"z": "1", "a": "\\u007f\\n\xf0\x9f\x90\xb3"},'
        b' "n": [9007199254740993, -1, true, null]\n}'
    )
    trimmed = trim_index(parse(source), [AMD64], {})[0].manifest
    assert (
        trimmed.body
        == (
            '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":['
            '{"digest":"sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b",'
            '"mediaType":"application/vnd.oci.image.manifest.v1+json","size":1,"platform":{"os":"linux",'
            '"architecture":"amd64","os.features":["é<&>\u2028/"]}}],"annotations":{"z":"1","a":"\x7f\\n🐳"},'
            '"n":[9007199254740993,-1,true,null]}'
        ).encode()
    )
    assert (
        trimmed.digest == "sha256:fb07c4bd1cf2befe07f26393fb8e0adfa7ec351a9bcf76bf2acab41f59fdcae4"
    )


def test_nothing_is_written_anew_when_nothing_drops() -> None:
    source = parse(
        b' {"manifests": [' + json.dumps(child(1, "linux/amd64")).encode() + b'], "x": 1.0}'
    )
    trimmed, _ = trim_index(source, [AMD64, ARM64], {})
    assert trimmed.manifest is source
    assert trimmed.matched == {AMD64}


def kept(document: dict[str, Any], *wanted: str) -> list[int]:
    trimmed, _ = trim_index(parse(document), [parse_platform(text) for text in wanted], {})
    return [entry.size for entry in trimmed.manifest.children] if trimmed.matched else []


@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [
        (["linux/amd64"], [1]),
        (["linux/arm"], [2, 3]),
        (["linux/arm/v7"], [2]),
        (["linux/arm/v6"], [3]),
        (["linux/arm64/v8"], [4]),
        (["windows/amd64"], [5, 6]),
        (["linux/arm64", "linux/amd64"], [1, 4]),
        (["plan9/amd64"], []),
    ],
    ids=str,
)
def test_entries_are_kept_in_their_order(wanted: list[str], sizes: list[int]) -> None:
    platforms = [
        "linux/amd64",
        "linux/arm",
        "linux/arm/v6",
        "linux/arm64",
        "windows/amd64",
        "windows/amd64",
    ]
    entries = [child(number, text) for number, text in enumerate(platforms, 1)]
    assert kept(index(*entries, child(7, None), child(8, "unknown/unknown")), *wanted) == sizes


def test_attestations_follow_their_child_wherever_they_stand() -> None:
    entries = (
        attestation(3, of=1),
        child(1, "linux/amd64"),
        child(2, "linux/arm64"),
        attestation(4, of=2),
    )
    assert kept(index(*entries), "linux/amd64") == [3, 1]
    assert kept(index(*entries), "linux/amd64", "linux/arm64") == [3, 1, 2, 4]
    assert kept(index(*entries), "unknown/unknown") == []


def test_nothing_is_written_when_no_platform_matches() -> None:
    source = parse(
        index(child(1, "linux/amd64"), attestation(2, of=1), child(3, "linux/arm/v7"), x=1.5)
    )
    trimmed, _ = trim_index(source, [ARM64], {})
    assert (trimmed.matched, trimmed.manifest) == (frozenset(), source)
    assert [str(have) for have in trimmed.available] == ["linux/amd64", "linux/arm/v7"]


def parent(*indexes: Manifest, **fields: object) -> Manifest:
    """Return an index of indexes."""
    return parse(
        index(
            *(
                {
                    "mediaType": each.media_type,
                    "digest": each.digest,
                    "size": each.size,
                    "x": number,
                    **fields,
                }
                for number, each in enumerate(indexes)
            )
        )
    )


def test_nested_indexes_are_trimmed_first_and_named_by_their_new_digest() -> None:
    both = parse(index(child(1, "linux/amd64"), child(2, "linux/arm64")))
    whole = parse(index(child(3, "linux/amd64")))
    none = parse(index(child(4, "linux/arm64")))
    middle = parent(both, whole)
    top = parent(none, middle, both, data=base64.b64encode(b"stale").decode())
    nested = {each.digest: each for each in (both, whole, none, middle)}
    trimmed, trimmed_nested = trim_index(top, [AMD64], nested)
    assert set(trimmed_nested) == {both.digest, whole.digest, middle.digest}
    small = trimmed_nested[both.digest]
    assert [entry.size for entry in small.children] == [1]
    assert trimmed_nested[whole.digest] is whole
    new_middle = trimmed_nested[middle.digest]
    assert [entry.digest for entry in new_middle.children] == [small.digest, whole.digest]
    assert json.loads(trimmed.manifest.body)["manifests"] == [
        {"mediaType": INDEX, "digest": new_middle.digest, "size": new_middle.size, "x": 1},
        {"mediaType": INDEX, "digest": small.digest, "size": small.size, "x": 2},
    ]
    assert trimmed.available == (ARM64, AMD64)


def test_index_of_indexes_that_lose_nothing_stays_as_it_is() -> None:
    inner = parse(index(child(1, "linux/amd64")))
    top = parent(inner)
    assert trim_index(top, [AMD64], {inner.digest: inner})[0].manifest is top


@pytest.mark.parametrize(
    ("extra", "words"),
    [("1.0", "number 1.0"), ("1e2", "number 1e2"), ('"\\ud800"', "lone surrogate")],
)
def test_index_that_would_not_survive_is_refused_only_when_an_entry_drops(
    extra: str, words: str
) -> None:
    text = json.dumps(index(child(1, "linux/amd64"), child(2, "linux/arm64"), x=0))
    source = parse(text.replace('"x": 0', f'"x": {extra}').encode())
    assert trim_index(source, [AMD64, ARM64], {})[0].manifest is source
    with pytest.raises(ContentError, match=words):
        trim_index(source, [AMD64], {})


def test_a_list_of_referrers_that_would_not_survive_is_not_extended() -> None:
    text = json.dumps(index(child(1, "linux/amd64"), x=0))
    held = parse(text.replace('"x": 0', '"x": "\\ud800"').encode())
    with pytest.raises(ContentError, match="lone surrogate"):
        extend_referrers_list(held, held.children)


PLATFORMS = [
    "linux/amd64",
    "linux/arm64",
    "linux/arm64/v8",
    "linux/arm",
    "linux/arm/v6",
    "windows/amd64",
]


@given(
    st.lists(st.sampled_from([*PLATFORMS, None]), max_size=6),
    st.lists(st.sampled_from(PLATFORMS).map(parse_platform), min_size=1, max_size=3),
    st.dictionaries(
        st.text(max_size=3), st.text(max_size=3) | st.integers(-(2**70), 2**70), max_size=3
    ),
)
def test_trimmed_index_reads_back_as_what_was_kept(
    platforms: list[str | None], wanted: list[Platform], extra: dict[str, Any]
) -> None:
    entries = [
        each
        for n, text in enumerate(platforms)
        for each in (child(n, text), attestation(n + 9, of=n))
    ]
    source = parse({"extra": extra, **index(*entries)})
    trimmed, _ = trim_index(source, wanted, {})
    again = parse_manifest(
        trimmed.manifest.body, content_type=INDEX, digest=trimmed.manifest.digest
    )
    assert again == trimmed.manifest._replace(is_trimmed=False)
    if trimmed.matched:
        assert trim_index(again, wanted, {})[0].manifest is again
        assert json.loads(again.body)["extra"] == extra


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("registry.example.com:5000", "team/app:v1"),
        ("localhost", "app@sha256:" + "0" * 64),
        ("oci-layout:./usb", "team/app:v1"),
        ("oci-layout:/media//disk", "app"),
    ],
)
def test_a_full_name_is_split_where_it_was_joined(host: str, name: str) -> None:
    assert split_full_name(full_name(host, name)) == (host, name)
