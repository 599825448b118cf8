"""Writes optima.txt: the least price of a choice in each e-graph beside this file.

    pip install highspy==1.15.1 && python3 optima.py

One variable for each term; each class that is needed has one. Choices that depend on themselves are
forbidden one cycle at a time, until the best choice left has none: the optimum is exact.
"""

from pathlib import Path

import highspy


def read(path):
    lines = path.read_text().splitlines()
    results = [int(word) for word in lines[0].split()[1:]]
    classes = []
    for line in lines[1:]:
        terms = [[int(word) for word in term.split()] for term in line.split(":")[1].split("|")]
        classes.append([(term[0], sorted(set(term[1:]))) for term in terms])
    return results, classes


def cycle(results, chosen):
    """A cycle of the choice as (class, term) pairs, if there is one."""
    state, stack = {}, []

    def visit(at):
        state[at] = 1
        stack.append(at)
        for under in chosen[at][1]:
            if state.get(under) == 1:
                return stack[stack.index(under):]
            if under not in state:
                found = visit(under)
                if found:
                    return found
        stack.pop()
        state[at] = 2
        return None

    for result in results:
        if result not in state:
            found = visit(result)
            if found:
                return [(at, chosen[at][0]) for at in found]
    return None


def optimum(results, classes):
    model = highspy.Highs()
    model.silent()
    taken = [[model.addBinary(obj=price) for price, _ in terms] for terms in classes]
    for result in results:
        model.addConstr(sum(taken[result]) >= 1)
    for at, terms in enumerate(classes):
        for term, (_, operands) in enumerate(terms):
            if at in operands:
                model.addConstr(taken[at][term] == 0)
                continue
            for operand in operands:
                model.addConstr(taken[at][term] <= sum(taken[operand]))
    while True:
        model.minimize()
        values = model.getSolution().col_value
        chosen = {}
        for at, terms in enumerate(classes):
            for term, (_, operands) in enumerate(terms):
                if values[taken[at][term].index] > 0.5 and at not in chosen:
                    chosen[at] = (term, operands)
        found = cycle(results, chosen)
        if found is None:
            needed, open_classes = set(), list(results)
            while open_classes:
                at = open_classes.pop()
                if at not in needed:
                    needed.add(at)
                    open_classes.extend(chosen[at][1])
            return sum(classes[at][chosen[at][0]][0] for at in needed)
        model.addConstr(sum(taken[at][term] for at, term in found) <= len(found) - 1)


def main():
    folder = Path(__file__).parent
    lines = []
    for path in sorted(folder.glob("*.txt")):
        if path.name != "optima.txt":
            lines.append(f"{path.stem} {optimum(*read(path))}\n")
    (folder / "optima.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
