"""Extraction: text or a refusal that tells the user what to do, whatever the bytes are."""

import contextlib
import io
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from fpdf import FPDF
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pypdf import PdfReader, PdfWriter

from studyhall.documents import (
    Corrupt,
    DocumentRejected,
    Encrypted,
    Kind,
    Missing,
    NoText,
    TooLarge,
    WrongType,
    extract,
)
from studyhall.patterns.core.errors import Permanent

SAMPLES = Path(__file__).parents[3] / "reference" / "samples"
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
RELS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" Target="{}"/>'
    "</Relationships>"
)


def docx(body, *, head="", main="word/document.xml", **parts):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_rels/.rels", RELS.format(main))
        archive.writestr(main, f'{head}<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>')
        for name, content in parts.items():
            archive.writestr(f"word/{name}.xml", content)
    return buffer.getvalue()


def paragraph(text, style=""):
    chosen = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{chosen}<w:r><w:t>{text}</w:t></w:r></w:p>"


def pdf(*pages):
    made = FPDF()
    made.set_font("Helvetica", size=12)
    for text in pages:
        made.add_page()
        made.multi_cell(0, 6, text)
    return bytes(made.output())


@pytest.fixture
def stored(tmp_path):
    def store(content, name="upload"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return store


# ---- what is read


@pytest.mark.parametrize(
    ("name", "kind", "title", "start"),
    [
        ("water-cycle.md", Kind.MARKDOWN, "The water cycle", "Water never stays in one place for long."),
        ("plate-tectonics.docx", Kind.DOCX, "Plate tectonics", "The ground seems to be the one thing"),
        ("photosynthesis.pdf", Kind.PDF, "Photosynthesis", "Almost everything that lives is fed by light."),
    ],
)
def test_each_sample_gives_its_title_and_its_prose(name, kind, title, start):
    doc = extract(SAMPLES / name)
    assert (doc.kind, doc.title) == (kind, title)
    assert start in doc.text
    assert 600 <= len(doc.text.split()) <= 900
    assert (doc.pages == 2) if kind is Kind.PDF else (doc.pages is None and len(doc.sections) == 7)


def test_sentences_cut_by_the_margin_of_a_pdf_are_whole_again():
    text = extract(SAMPLES / "photosynthesis.pdf").text
    assert "Plants, algae and some bacteria catch the energy of sunlight and keep it in sugar." in text


@pytest.mark.parametrize("name", ["essay.txt", "essay.docx", "essay", "essay.exe", "../essay.md"])
def test_type_is_decided_by_the_bytes_not_the_name(stored, name):
    assert extract(stored(pdf("A PDF under any name."), Path(name).name)).kind is Kind.PDF


def test_markdown_loses_its_marks_and_keeps_its_words(stored):
    doc = extract(
        stored(
            b"---\nlayout: page\n---\n# Tides *rise*\n\nThe **Moon** pulls `water`, see [here](http://x.example/a).\n"
            b"Wrapped line.\n\n- first item\n- [ ] second item\n\n> quoted words\n\n"
            b"Pull of the Sun\n---\n\nIt helps.\n"
        )
    )
    assert (doc.kind, doc.title) == (Kind.MARKDOWN, "Tides rise")
    assert "The Moon pulls water, see here. Wrapped line." in doc.text
    assert "first item\n\nsecond item\n\nquoted words" in doc.text
    assert [section.heading for section in doc.sections] == ["Tides rise", "Pull of the Sun"]


def test_word_document_with_translated_styles_boxes_and_deletions(stored):
    fallback = (
        '<mc:AlternateContent xmlns:mc="m"><mc:Choice><w:p><w:r><w:t>In a box.</w:t></w:r></w:p></mc:Choice>'
        "<mc:Fallback><w:p><w:r><w:t>In a box.</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent>"
    )
    body = (
        paragraph("Ebbe und Flut", "berschrift1")
        + "<w:p><w:r><w:t>Der Mond</w:t><w:tab/><w:t>zieht.</w:t></w:r>"
        + f"<w:del><w:r><w:delText>weg</w:delText></w:r></w:del>{fallback}</w:p>"
    )
    style = '<w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    styles = f'<w:styles xmlns:w="{WORD}">{style}</w:styles>'
    doc = extract(stored(docx(body, main="word/document2.xml", styles=styles)))
    assert [section.heading for section in doc.sections] == ["Ebbe und Flut"]
    assert "Der Mond zieht." in doc.text
    assert doc.text.count("In a box.") == 1
    assert "weg" not in doc.text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
def test_text_files_of_every_common_encoding(stored, encoding):
    text = "Crème brûlée über Zürich, señor. Déjà vu!"
    doc = extract(stored(text.encode(encoding)))
    assert (doc.kind, doc.text) == (Kind.TEXT, text)


def test_text_never_holds_what_databases_refuse(stored):
    text = "Bell\x07, \x1b[0m escape, zero\u200bwidth, fine. " + "Otherwise it is ordinary prose. " * 10
    assert extract(stored(text.encode())).text.startswith("Bell, [0m escape, zerowidth, fine. Otherwise")


def test_pdf_that_only_forbids_printing_is_read(stored):
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("Readable for everyone."))))
    writer.encrypt("", "owner-secret", algorithm="AES-256")
    buffer = io.BytesIO()
    writer.write(buffer)
    assert extract(stored(buffer.getvalue())).text == "Readable for everyone."


# ---- what is refused, and how


def encrypted_pdf(algorithm):
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("Secret."))))
    writer.encrypt("user-secret", "owner-secret", algorithm=algorithm)
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def plain_zip(names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in names.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def with_password_flag(content):
    """Set bit 0 of the flags in every header of a zip: "this entry is encrypted"."""
    raw = bytearray(content)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = raw.find(signature)
        while at >= 0:
            raw[at + offset] |= 1
            at = raw.find(signature, at + 4)
    return bytes(raw)


OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)
REFUSED = {
    "empty file": (b"", NoText, "empty"),
    "only blanks": (b" \n\t\n", NoText, "no text"),
    "only numbers": (b"1 2 3", NoText, "no text"),
    "pdf without text": (pdf(""), NoText, "OCR"),
    "docx without text": (docx(""), NoText, "no text"),
    "truncated pdf": (pdf("Some text.")[:400], Corrupt, "new PDF"),
    "only a pdf header": (b"%PDF-1.7\n", Corrupt, "new PDF"),
    "pdf with a password, AES": (encrypted_pdf("AES-256"), Encrypted, "without it"),
    "pdf with a password, RC4": (encrypted_pdf("RC4-128"), Encrypted, "without it"),
    "docx with a password": (OLE + "EncryptedPackage".encode("utf-16-le"), Encrypted, "Remove it"),
    "zip with a password": (with_password_flag(docx(paragraph("Hello"))), Encrypted, "Unpack"),
    "old Word": (OLE + "WordDocument".encode("utf-16-le"), WrongType, ".docx"),
    "truncated docx": (docx(paragraph("word " * 2000))[:-30], Corrupt, "Word"),
    "docx with broken XML": (docx("<w:p>"), Corrupt, "Word"),
    "docx without its document": (plain_zip({"_rels/.rels": RELS.format("word/gone.xml")}), Corrupt, "Word"),
    "spreadsheet": (plain_zip({"_rels/.rels": RELS.format("xl/workbook.xml")}), WrongType, "PDF"),
    "zip archive": (plain_zip({"a.txt": "hello"}), WrongType, "Unpack"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), WrongType, "picture"),
    "program": (b"\x7fELF" + bytes(100), WrongType, "program"),
    "web page": (b"  <!DOCTYPE html><html><body>Hi</body></html>", WrongType, "web page"),
    "rich text": (b"{\\rtf1 hello}", WrongType, "rich-text"),
    "binary": (bytes(range(256)) * 4, WrongType, "not text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_is_permanent_and_says_what_to_do(stored, case):
    content, expected, hint = REFUSED[case]
    with pytest.raises(expected, match=hint) as caught:
        extract(stored(content))
    assert isinstance(caught.value, Permanent)
    # It comes back from a child process: class and message must survive the trip.
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (type(again), str(again)) == (expected, str(caught.value))


def test_missing_file_folder_and_pipe_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(Missing, match="Upload it again"):
            extract(path)


def test_200_megabytes_are_refused_by_size_without_being_read(tmp_path):
    path = tmp_path / "huge.pdf"
    with path.open("wb") as file:
        file.write(b"%PDF-1.7\n")
        file.truncate(200 * 1024 * 1024)  # sparse: takes no disk
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(TooLarge, match="200 MB, the limit is 50 MB"):
            extract(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert time.perf_counter() - began < 5
    with pytest.raises(TooLarge, match=r"the limit is 0\.0 MB"):
        extract(SAMPLES / "water-cycle.md", 1000)


# ---- hostile files


def measured(path):
    tracemalloc.start()
    try:
        with pytest.raises(DocumentRejected) as caught:
            extract(path)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_zip_bomb_is_refused_before_it_is_unpacked(stored):
    bomb = docx(paragraph(" " * 50_000_000))
    assert len(bomb) < 100_000
    error, peak = measured(stored(bomb))
    assert isinstance(error, TooLarge)
    assert peak < 10_000_000


def test_zip_bomb_that_lies_about_its_size_gives_no_more_than_it_claims(stored):
    honest = docx(paragraph(" " * 50_000_000))
    with zipfile.ZipFile(io.BytesIO(honest)) as archive:
        true_size = archive.getinfo("word/document.xml").file_size
    lie = honest.replace(struct.pack("<I", true_size), struct.pack("<I", 900_000))
    assert lie != honest
    error, peak = measured(stored(lie))
    assert isinstance(error, Corrupt)
    assert peak < 10_000_000


HUGE = {
    "start tag": "<w:p{}/>",
    "comment with tags in it": "<!-- {} --><w:p/>",
    "instruction with tags in it": "<?x {} ?><w:p/>",
    "instruction behind what only looks like a comment": f"{paragraph('<![CDATA[<!--]]>')}<?x --> {{}} ?>",
}


@pytest.fixture(scope="module")
def honest_seconds(tmp_path_factory):
    path, began = tmp_path_factory.mktemp("honest") / "upload", time.process_time()
    path.write_bytes(docx("".join(paragraph(f"word {number:x}") for number in range(60_000))))
    extract(path)
    return time.process_time() - began


@pytest.mark.parametrize("what", HUGE)
def test_one_huge_token_of_a_word_file_is_refused_before_expat_reads_it_again_and_again(stored, what, honest_seconds):
    """Expat 2.5 takes quadratic time for it: 433 kB in a zip kept a reader busy until its deadline, three times."""
    between = " " if what == "start tag" else "<"
    noise = "".join(f"{between}a{number}='{number:x}'" for number in range(400_000))  # 6 MB that do not pack to nothing
    began = time.process_time()
    with pytest.raises(Corrupt, match="save it under a new name"):
        extract(stored(docx(HUGE[what].format(noise))))
    assert time.process_time() - began < 2 + 5 * honest_seconds


def test_comments_instructions_and_cdata_of_honest_size_are_read(stored):
    text = "<!-- <w:p> --><?x y?><w:p><w:r><w:t><![CDATA[<!-- tides ]]>rise</w:t></w:r></w:p>"
    assert "<!-- tides rise" in extract(stored(docx(text + f"<!-- {'<' * 70_000} -->" * 5))).text


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_zipfile_cannot_bound_is_refused(stored, method):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("_rels/.rels", RELS.format("word/document.xml"))
        archive.writestr("word/document.xml", f'<w:document xmlns:w="{WORD}">{" " * 100_000}</w:document>')
    with pytest.raises(Corrupt):
        extract(stored(buffer.getvalue()))


def test_zip_with_too_many_parts_is_refused(stored):
    with pytest.raises(TooLarge, match="parts"):
        extract(stored(plain_zip({f"p{number}": "" for number in range(5001)})))


ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
BILLION_LAUGHS = f'<?xml version="1.0"?><!DOCTYPE w [<!ENTITY e0 "lol">{ENTITIES}]>'
EXTERNAL = '<?xml version="1.0"?><!DOCTYPE w [<!ENTITY e9 SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("head", [BILLION_LAUGHS, EXTERNAL])
def test_xml_entities_are_refused_not_expanded(stored, head):
    error, peak = measured(stored(docx(paragraph("&e9;"), head=head)))
    assert isinstance(error, Corrupt)
    assert "entities" in str(error)
    assert peak < 10_000_000


def test_deeply_nested_xml_does_not_take_the_interpreter_down(stored):
    depth = 200_000
    body = "<w:r>" * depth + "<w:t>deep</w:t>" + "</w:r>" * depth
    with contextlib.suppress(DocumentRejected):  # another expat may refuse the depth: also fine
        assert "deep" in extract(stored(docx(f"<w:p>{body}</w:p>"))).text


def test_pdf_stream_bomb_is_refused(stored):
    packed = zlib.compress(b"BT /F1 12 Tf (hello) Tj ET" + b" " * 100_000_000, 9)
    assert len(packed) < 300_000
    font = b"/Resources<</Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
    parts = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R%s>>" % font,
        b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream" % (len(packed), packed),
    ]
    body, offsets = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    body += b"xref\n0 5\n0000000000 65535 f \n%strailer<</Size 5/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        table,
        body.rindex(b"endobj\n") + 7,
    )
    with pytest.raises(TooLarge):
        extract(stored(body))


@pytest.mark.parametrize("line", ["[" * 200_000, "![" * 100_000, "*a" * 100_000, "<!--" * 50_000, "> " * 100_000])
def test_markdown_made_to_slow_down_patterns_is_still_linear(stored, line):
    began = time.perf_counter()
    extract(stored(f"# Title\n\n{line}\n{line[:15_000]}\nwords\n".encode()))
    assert time.perf_counter() - began < 10


# ---- any bytes at all

VALID = {"pdf": pdf("Words on a page.", "More words."), "docx": docx(paragraph("Words in a document."))}
HEADS = st.sampled_from([b"", b"%PDF-1.5\n", b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"\xff\xfe", b"# a\n"])
ANY_SPEED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def read_or_refuse(path, content):
    path.write_bytes(content)
    try:
        doc = extract(path)
    except Permanent:
        return
    doc.text.encode("utf-8")  # no lone surrogates
    assert "\0" not in doc.text
    assert doc.title
    assert any(character.isalpha() for character in doc.text)


@ANY_SPEED
@given(head=HEADS, rest=st.binary(max_size=3000))
def test_random_bytes_give_text_or_a_permanent_error(tmp_path, head, rest):
    read_or_refuse(tmp_path / "random", head + rest)


@pytest.mark.parametrize("kind", VALID)
@ANY_SPEED
@given(data=st.data())
def test_damaged_documents_give_text_or_a_permanent_error(tmp_path, kind, data):
    raw = bytearray(VALID[kind])
    positions = st.integers(0, len(raw) - 1)
    for at, value in data.draw(st.lists(st.tuples(positions, st.integers(0, 255)), max_size=12)):
        raw[at] = value
    cut = data.draw(st.one_of(st.none(), positions))
    read_or_refuse(tmp_path / "damaged", bytes(raw[:cut]))


@ANY_SPEED
@given(text=st.text(max_size=2000))
def test_any_text_is_text_or_refused(tmp_path, text):
    read_or_refuse(tmp_path / "text", text.encode("utf-8", "surrogatepass"))
