"""Writes the DOCX and the PDF of this folder from the texts below: `python make_samples.py [folder]`.

Both are made byte for byte the same each time, so that a changed sample in version control is a changed text.
The texts were written for this project.
"""

from __future__ import annotations

import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)

Text = list[tuple[str, list[str]]]

PLATE_TECTONICS: Text = [
    (
        "Plate tectonics",
        [
            "The ground seems to be the one thing that stays where it is. It does not. The outer shell of "
            "the Earth is broken into about a dozen large plates, and each plate moves a few centimetres "
            "every year, about as fast as a fingernail grows. Plate tectonics is the theory of how these "
            "plates move and of what happens where they meet.",
        ],
    ),
    (
        "What a plate is made of",
        [
            "A plate is a piece of the lithosphere. The lithosphere is the rigid outer layer of the "
            "Earth: it consists of the crust and of the cold top of the mantle. Below the lithosphere "
            "lies the asthenosphere, a part of the mantle that is so hot that its rock creeps like very "
            "stiff honey. The plates float on the asthenosphere.",
            "There are two kinds of crust. Oceanic crust is thin and dense, because it is made of basalt. "
            "Continental crust is thick and light, because it is made mostly of granite. When two plates "
            "meet, the density of their crust decides which of them goes down: oceanic crust sinks, "
            "continental crust stays at the surface.",
        ],
    ),
    (
        "What moves the plates",
        [
            "The heat of the Earth moves the plates. Radioactive elements in the mantle give off heat, "
            "and hot rock in the mantle rises while cold rock sinks. This slow circulation is called "
            "convection. Convection carries heat from the core to the surface and drags the plates along.",
            "The plates also pull themselves. Old oceanic crust is cold and dense, so the edge of a plate "
            "that sinks into the mantle pulls the rest of the plate behind it. This slab pull is the "
            "strongest of the forces that move a plate. At the other end, new crust lies higher than old "
            "crust and pushes the plate away from the ridge.",
        ],
    ),
    (
        "Where plates part",
        [
            "At a divergent boundary two plates move apart. Hot rock from the mantle rises into the gap, "
            "melts as the pressure drops, and turns into magma. The magma cools and becomes new oceanic "
            "crust. Most divergent boundaries lie under the sea and form a mid-ocean ridge, a chain of "
            "mountains that runs around the Earth like the seam of a ball. The growth of the sea floor at "
            "a mid-ocean ridge is called sea-floor spreading.",
            "A divergent boundary can also cut a continent. The land sinks between two faults and a rift "
            "valley opens. If the rift valley keeps growing, the sea breaks in and a new ocean is born.",
        ],
    ),
    (
        "Where plates meet",
        [
            "At a convergent boundary two plates move towards each other. If one of them carries oceanic "
            "crust, it bends and sinks into the mantle. This is called subduction. Subduction leaves a "
            "deep ocean trench where the plate bends. The sinking plate carries water into the mantle, "
            "the water lowers the melting point of the rock, and magma rises from the subduction zone. "
            "The magma feeds volcanoes, and so a row of volcanoes stands behind every ocean trench.",
            "When two plates with continental crust meet, neither of them sinks, because continental "
            "crust is too light. The continents crumple and mountains rise. The Himalayas are such "
            "mountains: India has been pushing into Asia for about fifty million years, and the mountains "
            "still grow.",
        ],
    ),
    (
        "Where plates slide",
        [
            "At a transform boundary two plates slide past each other. No crust is made there and none is "
            "lost. The rock on both sides of a fault sticks, bends and stores energy like a bow. When the "
            "fault slips, the energy is set free within seconds and the ground shakes: this is an "
            "earthquake. Earthquakes happen at every plate boundary, but the deepest earthquakes happen "
            "in a subduction zone, where a cold plate reaches far down into the mantle.",
        ],
    ),
    (
        "How we know",
        [
            "Early in the last century Alfred Wegener saw that the coasts of Africa and South America fit "
            "together, and that fossils and layers of rock on both coasts are the same. He concluded that "
            "the continents had once been one, a supercontinent he called Pangaea, and that continental "
            "drift had pulled them apart. He could not say what force moves continents, and most "
            "geologists did not believe him.",
            "The proof came from the sea floor. Basalt that cools at a mid-ocean ridge records the "
            "direction of the magnetic field. The magnetic field of the Earth reverses now and then, and "
            "so the sea floor carries magnetic stripes, the same on both sides of the ridge. The magnetic "
            "stripes show that sea-floor spreading is real and how fast it goes. Today satellites measure "
            "the drift of the continents directly, and maps of earthquakes and volcanoes draw the edges "
            "of the plates.",
        ],
    ),
]

PHOTOSYNTHESIS: Text = [
    (
        "Photosynthesis",
        [
            "Almost everything that lives is fed by light. Plants, algae and some bacteria catch the "
            "energy of sunlight and keep it in sugar. This process is called photosynthesis. "
            "Photosynthesis takes carbon dioxide and water, and gives back sugar and oxygen.",
        ],
    ),
    (
        "The place: the chloroplast",
        [
            "In plants, photosynthesis happens in the chloroplast, a small green body inside the cells of "
            "a leaf. The chloroplast is filled with stacks of flat sacks called thylakoids. The liquid "
            "around the thylakoids is called the stroma. The two halves of photosynthesis happen in these "
            "two places: the light reactions in the membrane of the thylakoids, the Calvin cycle in the "
            "stroma.",
            "The membrane of the thylakoids holds chlorophyll. Chlorophyll is the pigment that makes a "
            "leaf green: it absorbs red light and blue light and sends green light back. Other pigments, "
            "such as carotenoids, absorb light that chlorophyll misses. In autumn the leaf takes its "
            "chlorophyll apart, and the yellow of the carotenoids comes to view.",
        ],
    ),
    (
        "Gathering light: the light reactions",
        [
            "When chlorophyll absorbs light, one of its electrons gains energy and leaves. The electrons "
            "travel along the electron transport chain, a row of proteins in the membrane, and lose a "
            "little energy at each protein. The electron transport chain spends that energy on pumping "
            "protons into the thylakoids.",
            "The chlorophyll needs its electrons back, and it takes them from water. Water is split into "
            "oxygen, protons and electrons. The oxygen leaves the leaf; all the oxygen we breathe was "
            "once part of water. The protons crowd inside the thylakoids and flow out through an enzyme "
            "called ATP synthase. ATP synthase works like a mill: the protons turn it, and it makes ATP.",
            "At the end of the electron transport chain the electrons are lifted by light a second time "
            "and loaded onto a carrier called NADPH. So the light reactions turn the energy of light into "
            "two things that can be carried about: ATP, which is energy for a short while, and NADPH, "
            "which is a loan of electrons.",
        ],
    ),
    (
        "Making sugar: the Calvin cycle",
        [
            "The Calvin cycle needs no light of its own, but it lives on the ATP and the NADPH that the "
            "light reactions make. It begins when an enzyme called rubisco fastens carbon dioxide to a "
            "sugar with five carbon atoms. Rubisco is slow, so a leaf keeps a great deal of it; rubisco "
            "is thought to be the most abundant protein on Earth.",
            "The new molecule breaks into two halves, and ATP and NADPH turn the halves into a small "
            "sugar. Most of the small sugar is used to rebuild the molecule the Calvin cycle began with. "
            "One part in six leaves the Calvin cycle and becomes glucose, starch or cellulose. Starch is "
            "the store of the plant, and cellulose is the wall of its cells.",
        ],
    ),
    (
        "The price of an open door",
        [
            "Carbon dioxide enters a leaf through pores called stomata. Through the same stomata the leaf "
            "loses water. On a hot and dry day the plant closes its stomata to save water, and then "
            "carbon dioxide runs short. Rubisco now makes a mistake: it takes oxygen instead of carbon "
            "dioxide. This is called photorespiration, and photorespiration wastes energy and sugar.",
            "Some plants have found a way round. Maize gathers carbon dioxide in one kind of cells and "
            "hands it to rubisco in another, so photorespiration is rare. A cactus opens its stomata at "
            "night, stores carbon dioxide as an acid, and runs the Calvin cycle by day behind closed "
            "stomata. Both ways cost ATP, and both save water.",
        ],
    ),
    (
        "What sets the pace",
        [
            "Three things set the pace of photosynthesis: light, carbon dioxide and temperature. In dim "
            "light the light reactions are too slow, and more carbon dioxide changes nothing. In bright "
            "light the Calvin cycle is the slower half, and more carbon dioxide helps. Temperature "
            "matters because enzymes do the work: a cold enzyme is slow, and a hot enzyme loses its "
            "shape.",
            "Photosynthesis changed the Earth. Before there was photosynthesis, the atmosphere held "
            "almost no oxygen. Bacteria in the sea began to split water, and over a billion years oxygen "
            "filled the atmosphere. Animals that breathe oxygen became possible, and they return carbon "
            "dioxide to the plants. Coal and oil are old sugar too: when we burn them, we set free light "
            "that fell on a leaf long ago.",
        ],
    ),
]


def write_docx(path: Path, text: Text) -> None:
    """The smallest package Word opens: content types, two relationships, a title, styles and the document."""
    head = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    mime = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    core = "application/vnd.openxmlformats-package.core-properties+xml"

    def paragraph(content: str, style: str = "") -> str:
        chosen = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
        return f'<w:p>{chosen}<w:r><w:t xml:space="preserve">{escape(content)}</w:t></w:r></w:p>'

    body = "".join(
        paragraph(heading, "Heading1" if index else "Title") + "".join(paragraph(part) for part in parts)
        for index, (heading, parts) in enumerate(text)
    )
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{style}"><w:name w:val="{name}"/>'
        f'<w:rPr><w:b/><w:sz w:val="{size}"/></w:rPr></w:style>'
        for style, name, size in (("Title", "Title", 48), ("Heading1", "heading 1", 32))
    )
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{mime}.document.main+xml"/>'
        f'<Override PartName="/word/styles.xml" ContentType="{mime}.styles+xml"/>'
        f'<Override PartName="/docProps/core.xml" ContentType="{core}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{office}/officeDocument" Target="word/document.xml"/>'
        f'<Relationship Id="r2" Type="{package}/relationships/metadata/core-properties" '
        'Target="docProps/core.xml"/></Relationships>',
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{office}/styles" Target="styles.xml"/></Relationships>',
        "docProps/core.xml": f'<cp:coreProperties xmlns:cp="{package}/metadata/core-properties" '
        f'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{escape(text[0][0])}</dc:title>'
        "</cp:coreProperties>",
        "word/styles.xml": f"<w:styles {word}>{styles}</w:styles>",
        "word/document.xml": f"<w:document {word}><w:body>{body}</w:body></w:document>",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            entry = zipfile.ZipInfo(name, WRITTEN.timetuple()[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, head + content)


def write_pdf(path: Path, text: Text) -> None:
    from fpdf import FPDF

    pdf = FPDF(format="A4")
    pdf.set_creation_date(WRITTEN)
    pdf.set_title(text[0][0])
    pdf.set_margin(22)
    pdf.add_page()
    for index, (heading, parts) in enumerate(text):
        pdf.set_font("Helvetica", "B", 13 if index else 20)
        pdf.multi_cell(0, 9, heading, new_x="LMARGIN", new_y="NEXT")
        pdf.set_font("Helvetica", "", 11)
        for part in parts:
            pdf.multi_cell(0, 6, part, align="L", new_x="LMARGIN", new_y="NEXT")
            pdf.ln(3)
    pdf.output(str(path))


def main(folder: Path = HERE) -> None:
    write_docx(folder / "plate-tectonics.docx", PLATE_TECTONICS)
    write_pdf(folder / "photosynthesis.pdf", PHOTOSYNTHESIS)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
