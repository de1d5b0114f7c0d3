"""The losses of losses.py inside TRL, a script of one's own, and an audit of what engines ship."""

from importlib.util import find_spec
from pathlib import Path

# Python looks in a script's own directory first. So a losses.py of yours, or a folder of that name,
# would be imported in place of ours, and what follows would be puzzling.
found = find_spec("losses")
where = found and (found.origin or found.submodule_search_locations[0])
if not where or Path(where).parent != Path(__file__).parents[1]:
    raise ImportError(f"{where} hides this project's losses.py: give it another name")
