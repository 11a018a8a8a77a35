"use strict";
// A click on a column's name sorts by it: up, down, and as the rows came. What has no value is last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const asTheyCame = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];
  const collator = new Intl.Collator("en", {numeric: true});
  headers.forEach((header, column) => {
    if (header.tagName !== "TH") return;
    const isNumber = header.classList.contains("n");
    const valueOf = row => {
      const text = row.cells[column].textContent.trim();
      if (text === "-" || text === "") return null;
      if (!isNumber) return text;
      const number = Number(text);
      return Number.isNaN(number) ? null : number;
    };
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const before = header.getAttribute("aria-sort");
      headers.forEach(one => one.removeAttribute("aria-sort"));
      if (before === "descending") {
        body.append(...asTheyCame);
        return;
      }
      const sign = before === "ascending" ? -1 : 1;
      header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const keyed = asTheyCame.map(row => [valueOf(row), row]);
      keyed.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (isNumber ? a - b : collator.compare(a, b));
      });
      body.append(...keyed.map(([, row]) => row));
    });
  });
}
