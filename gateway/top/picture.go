package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"evenkeel/gateway/live"
)

// The picture of a group: a column for each rank, by host, filled with KV tokens up to
// the line at the fullest, which every step waits for. What is between is the waste.
const (
	axisCells    = 7 // number of KV tokens left of the columns
	tallRows     = 6 // of a picture of one band
	lowRows      = 3 // of each band where there are several
	wideCell     = 4 // a rank's column is no wider
	waste        = "░"
	leastBacklog = 2048 // tokens that fill a cell where no rank has more
	drains       = "·"  // above a rank that drains: it is meant to be empty
)

// column is a rank in the picture.
type column struct {
	rank  *live.Rank
	first bool // of its host, and not of the band
	host  string
}

func hostOf(name string) string {
	engine, _, _ := strings.Cut(name, "/")
	if i := strings.LastIndexByte(engine, ':'); i > 0 {
		return engine[:i]
	}
	return engine
}

// bands are the columns side by side, as many as fit into a width, and how wide each is.
func bands(ranks []live.Rank, width int) (list [][]column, cells int) {
	var all []column
	seen := map[string]int{}
	for i := range ranks {
		host := hostOf(ranks[i].Name)
		if _, ok := seen[host]; !ok {
			seen[host] = len(seen)
		}
		all = append(all, column{rank: &ranks[i], host: host})
	}
	slices.SortStableFunc(all, func(a, b column) int { return cmp.Compare(seen[a.host], seen[b.host]) })
	room := max(8, width-axisCells-1)
	cells = max(1, min(wideCell, (room-len(seen))/max(1, len(all))))
	var band []column
	used := 0
	several := 1 + (len(all)*cells+len(seen)-1)/room // with as many ranks each
	each := (len(all) + several - 1) / several
	for _, c := range all {
		c.first = len(band) > 0 && band[len(band)-1].host != c.host
		need := cells
		if c.first {
			need++
		}
		if len(band) == each || len(band) > 0 && used+need > room {
			list, band, used, c.first, need = append(list, band), nil, 0, false, cells
		}
		band, used = append(band, c), used+need
	}
	if len(band) > 0 {
		list = append(list, band)
	}
	return list, cells
}

// picture draws a group.
func (s screen) picture(g live.Group) (lines []string) {
	list, cells := bands(g.Ranks, s.width-2)
	for _, o := range g.Counterfactuals[:min(3, len(g.Counterfactuals))] {
		word := "longer"
		if o.SavedMs < 0 {
			word = "shorter"
		}
		lines = append(lines, "  "+faint.Render(fmt.Sprintf("%*s ┄ with %s the line would be here, and a step %.1f ms %s", axisCells-2, count(o.MostTokens), o.Policy, max(o.SavedMs, -o.SavedMs), word)))
	}
	high := tallRows
	if len(list) > 1 {
		high = lowRows
	}
	most := float64(max(1, g.MostTokens))
	backlog := int64(leastBacklog)
	for i := range g.Ranks {
		backlog = max(backlog, g.Ranks[i].Backlog)
	}
	for _, band := range list {
		for row := high; row > 0; row-- {
			label := ""
			switch {
			case row == high:
				label = count(g.MostTokens) + " ─"
			case row == 1:
				label = "0 ─"
			}
			lines = append(lines, "  "+padLeft(label, axisCells)+" "+strings.Join(drawn(band, func(c column) string { return cell(c.rank, g.Barrier, most, row, high, cells) }), ""))
		}
		if g.Rounds != nil {
			lines = append(lines, "  "+padLeft("new ─", axisCells)+" "+strings.Join(drawn(band, func(c column) string {
				return filled.Render(text(block(float64(c.rank.Backlog)/float64(backlog)), cells))
			}), ""))
		}
		if marks := strings.TrimRight(strings.Join(drawn(band, func(c column) string { return padded(mark(c.rank), cells) }), ""), " "); marks != "" {
			lines = append(lines, "  "+strings.Repeat(" ", axisCells+1)+bad.Render(marks))
		}
		lines = append(lines, "  "+strings.Repeat(" ", axisCells+1)+faint.Render(hosts(band, cells)))
	}
	return lines
}

func drawn(band []column, draw func(column) string) (cells []string) {
	for _, c := range band {
		if c.first {
			cells = append(cells, " ")
		}
		cells = append(cells, draw(c))
	}
	return cells
}

// cell is a part of a column.
func cell(r *live.Rank, barrier bool, most float64, row, high, cells int) string {
	if !r.Steps {
		return strings.Repeat(" ", cells)
	}
	eighths := int(float64(r.KVTokens-r.Unread)/most*float64(8*high)+0.5) - 8*(row-1)
	switch {
	case eighths >= 8:
		return filled.Render(text("█", cells))
	case eighths > 0:
		return filled.Render(text(string([]rune("▁▂▃▄▅▆▇")[eighths-1]), cells))
	case r.State == live.RankDraining:
		return faint.Render(text(drains, cells))
	case barrier:
		return faint.Render(text(waste, cells))
	}
	return text(" ", cells)
}

// text fills a cell of a column with one sign.
func text(one string, cells int) string {
	if cells > 1 { // a gap between two columns
		return strings.Repeat(one, cells-1) + " "
	}
	return one
}

func mark(r *live.Rank) string {
	switch r.State {
	case live.RankUp:
		return " "
	case live.RankDraining:
		return "D"
	case live.RankOut:
		return "O"
	case live.RankForeign:
		return "F"
	case live.RankRemoved:
		return "R"
	}
	return "x"
}

// hosts names the hosts below their columns, each within its own.
func hosts(band []column, cells int) string {
	var b strings.Builder
	for i := 0; i < len(band); {
		n := i
		for n < len(band) && band[n].host == band[i].host {
			n++
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(padded(tail(band[i].host, (n-i)*cells), (n-i)*cells))
		i = n
	}
	return strings.TrimRight(b.String(), " ")
}

// gone are ranks that do not step, with the reason that their engine has; a line for each reason.
func gone(g live.Group, engines []live.Engine) (lines []string) {
	why := map[string]string{}
	for _, e := range engines {
		if e.Role != "prefill" && e.State != "up" {
			why[e.ID] = fmt.Sprintf("%s for %s: %s", e.State, span(e.SinceS), cmp.Or(e.Why, "no reason told"))
		}
	}
	ranks, order := map[string]int{}, []string{}
	for i := range g.Ranks {
		if r := &g.Ranks[i]; r.State != live.RankUp {
			engine, _, _ := strings.Cut(r.Name, "/")
			text := cmp.Or(why[engine], r.State)
			if ranks[text]++; ranks[text] == 1 {
				order = append(order, text)
			}
		}
	}
	for _, text := range order {
		lines = append(lines, fmt.Sprintf("  %d %s", ranks[text], bad.Render(text)))
	}
	return lines
}

// incidents is a line each: those that last, then those that are over. Where there is room, what clients see and what to do follow.
func (s screen) incidents() (lasting, over []string) {
	for _, in := range s.doc.Incidents {
		if in.UntilMs > 0 {
			often := ""
			if in.Times > 1 {
				often = fmt.Sprintf("%d times, the last one ", in.Times)
			}
			over = append(over, faint.Render(fmt.Sprintf("✓ %sover after %s: %s", often, span(float64(in.UntilMs-in.SinceMs)/1000), in.What)))
			continue
		}
		last := "" // of what comes and goes
		if in.LastMs > 0 {
			last = ", seen last " + span(float64(max(0, s.doc.AtMs-in.LastMs))/1000) + " ago"
		}
		text := fmt.Sprintf("! %s for %s%s: %s", in.Severity, span(float64(max(0, s.doc.AtMs-in.SinceMs))/1000), last, in.What)
		if s.height > everyInFull || s.height > firstInFull && len(lasting) == 0 {
			lines := append(s.wrapped(bad, text+". "+in.Clients), s.wrapped(faint, "Next: "+in.Next)...)
			lasting = append(lasting, strings.TrimPrefix(strings.Join(lines, "\n"), "  "))
			continue
		}
		if room := s.width - ansi.StringWidth(text); room > 30 {
			text += ". " + in.Clients
		}
		lasting = append(lasting, bad.Render(text))
	}
	return lasting, over
}

// Lines of a screen beyond which the first incident, or every one, is told in full.
const (
	firstInFull = 40
	everyInFull = 200
)

// failures is a line for all of them; none where no request has failed.
func (s screen) failures() (lines []string) {
	var parts []string
	for _, f := range s.doc.Failures {
		parts = append(parts, fmt.Sprintf("%s %s/%s/%s/%s", f.Outcome, count(int64(f.Last10S)), count(int64(f.Last5Min)), count(int64(f.LastHour)), count(int64(f.SinceStart))))
	}
	if len(parts) > 0 {
		lines = append(lines, strong.Render("failures")+" 10 s/5 min/1 h/start  "+strings.Join(parts, "  "))
	}
	return lines
}

func padLeft(text string, width int) string {
	return strings.Repeat(" ", max(0, width-ansi.StringWidth(text))) + text
}
