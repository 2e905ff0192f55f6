
// Click a heading to sort a table by that column; click again to reverse the order.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => {
        const [x, y] = [a, b].map((row) => row.cells[column].dataset.key);
        const [p, q] = [x, y].map(Number);
        if (Number.isNaN(p) || Number.isNaN(q)) return Number.isNaN(p) - Number.isNaN(q) || x.localeCompare(y);
        return p - q;
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
      table.tBodies[0].append(...rows);
    });
  });
}
