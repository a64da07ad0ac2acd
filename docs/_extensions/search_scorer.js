/* Rank search results. Sphinx ranks a page by the best single word, so a page whose title has one word
   of the query beats a heading that has all of them. This scorer ranks a page or section first if its
   title has all words of the query, and links to the section. The constants are Sphinx's defaults. */
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

  /* Return 45 if the heading equals the query, less if the heading has more words, and 0 if it lacks a
     word of the query. If a word of the heading only begins with a word of the query, return less. */
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
