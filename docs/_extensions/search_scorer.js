/* Rank search results. Sphinx ranks a page by its best word, so a title with one word of the query beats
   a heading with all words. This scorer puts a page or section with the words of the query in its title
   first, and links to the section. The constants are Sphinx's defaults. */
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

  /* Return 45 for a heading equal to the query, less for a longer heading, and 0 if the heading lacks a
     word of the query. A word that only begins with a word of the query counts less. */
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
