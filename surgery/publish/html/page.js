"use strict";
const markWide = () => {
  for (const box of document.querySelectorAll(".scroll")) box.classList.toggle("over", box.scrollWidth > box.clientWidth + 1);
};
markWide();
addEventListener("resize", markWide);
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead button").forEach((button) => {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].map((row) => [row, value(row), Number.parseFloat(value(row))]);
      rows.sort((a, b) => {
        const order = Number.isNaN(a[2]) || Number.isNaN(b[2]) ? a[1].localeCompare(b[1]) : a[2] - b[2];
        return down ? -order : order;
      });
      body.append(...rows.map((row) => row[0]));
    });
  });
}
