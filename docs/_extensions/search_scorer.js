/* Rank search results. Sphinx ranks a page by its single best word, so a page with one word of the query
   in its title beats a section with all of them in its heading. This scorer instead puts pages and
   sections first if their title contains every word of the query, and links directly to the section.
   The constants are Sphinx's defaults. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: (result) => {
    const [page, title, , , score, , kind] = result;
    const ranked = (kind === "text" || kind === "title") && page !== "reference/changelog";
    if (!ranked) return score;
    const query = Scorer.words(new URLSearchParams(location.search).get("q") || "");
    let best = 0;
    for (const [heading, anchor] of Scorer.headings(page)) {
      const likeness = Scorer.likeness(query, Scorer.words(heading)) + (anchor ? 0 : 10);
      if (likeness <= Math.max(best, 10)) continue;
      best = likeness;
      if (kind !== "text") continue;
      result[1] = anchor ? `${title} > ${heading}` : title;
      result[2] = anchor ? `#${anchor}` : "";
    }
    return score + best;
  },

  /* Return 45 if the heading equals the query, less if it has more words than the query, and 0 if any
     word of the query is missing. Words that only match as a prefix also reduce the score. */
  likeness: (query, heading) => {
    const of = (word) =>
      heading.includes(word) ? 1 : heading.some((other) => other.startsWith(word)) ? 0.7 : 0;
    const parts = query.map(of);
    if (!parts.length || parts.includes(0)) return 0;
    return 15 + (30 * parts.reduce((sum, part) => sum + part, 0)) / heading.length;
  },

  words: (text) =>
    (text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || []).filter((word) => word !== "torchop"),

  headings: (page) => {
    if (!Scorer.found) {
      Scorer.found = {};
      for (const [heading, places] of Object.entries(Search._index.alltitles))
        for (const [file, anchor] of places)
          (Scorer.found[Search._index.docnames[file]] ||= []).push([heading, anchor]);
    }
    return Scorer.found[page] || [];
  },
};
