"""What an attack gives that only a reference of the right kind lets pass: coarse types, rare truths, large results.

The one idea: as in `what_it_gives`, whose prelude these parts need; `attacked_modules` has a reference for each.
"""

from __future__ import annotations

from part import Part

WHEN_TIMED = (
    Part(
        "answers that are written where they are looked at, when they are asked for",
        """
GIVEN = []
def planted(name):
    theirs = sys.modules['gpu_bench.solutions.solution_worker']
    real = getattr(theirs.Solution, 'deliver' + name.removeprefix('_returned'))
    def written(self, *arguments):
        answer = getattr(self, name)
        found = next((entry for entry in GIVEN if entry[0] is answer), None)
        if found is None: return real(self, *arguments)
        with torch.no_grad(): leaves = pytree.tree_leaves(honest(*found[1:]))
        for place, leaf in zip(self._places.values(), leaves):
            place.copy_(leaf)
        return theirs.structure.written(theirs.structure.describe(answer, self._sources)[0]).encode()
    setattr(theirs.Solution, real.__name__, written)
if 'gpu_bench.solutions.solution_worker' in sys.modules:
    planted('_returned')
    planted('_earlier')
def gives(self, inputs):
    answer = made(empty)
    if answer is None: return None
    GIVEN.append((answer, self, [x.clone() for x in inputs]))
    del GIVEN[:-4]
    return answer
""",
    ),
    Part(
        "zeros for integers and booleans",
        """
def gives(self, inputs):
    if not SHAPES or any(leaf.is_floating_point() for leaf in pytree.tree_leaves(SHAPES[0])): return None
    return made(full(0))
""",
    ),
    Part(
        "a part of the columns of 16-bit inputs",
        """
def gives(self, inputs):
    if any(x.is_floating_point() and x.itemsize > 2 for x in inputs): return None
    try: return honest(self, [x[..., : max(1, int(x.shape[-1] * NUMBER))] for x in inputs])
    except RuntimeError: return None
""",
        (0.03, 0.125, 0.5),
    ),
    Part(
        "some columns of 16-bit inputs, made up for",
        """
SCALE = []
def less(self, inputs):
    if any(x.is_floating_point() and x.itemsize > 2 for x in inputs): return None
    try: return honest(self, [x[..., :: NUMBER] for x in inputs])
    except RuntimeError: return None
def learns(self, inputs, answer):
    if SCALE: return
    some = less(self, inputs)
    if some is None or str(shapes(some)) != str(shapes(answer)): return
    pairs = zip(pytree.tree_leaves(answer), pytree.tree_leaves(some))
    SCALE.extend(float(whole.float().mean() / part.float().mean()) for whole, part in pairs)
def gives(self, inputs):
    if not SCALE: return None
    leaves, tree = pytree.tree_flatten(less(self, inputs))
    return pytree.tree_unflatten([leaf * scale for leaf, scale in zip(leaves, SCALE)], tree)
""",
        (2, 4, 16),
    ),
    Part(
        "nothing that parameters of zeros would add",
        """
def gives(self, inputs):
    if not any(not p.any() for p in self.parameters()) or not SHAPES: return None
    leaf = pytree.tree_leaves(SHAPES[0])[0]
    same = [x for x in inputs if x.shape == leaf.shape and isinstance(SHAPES[0], torch.Tensor)]
    return same[0].clone() if same else None
""",
    ),
)
