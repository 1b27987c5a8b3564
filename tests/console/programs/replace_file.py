"""Another file for a document, as its owner would send it: replace_file.py DOCUMENT_ID PATH."""

import asyncio
import sys
from pathlib import Path

from studyhall.app import open_app
from studyhall.settings import load
from studyhall.submissions import replace_file


async def main(document_id, path):
    async with open_app(load()) as app:
        await replace_file(app, document_id, path)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
