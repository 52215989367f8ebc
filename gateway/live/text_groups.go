package live

import (
	"fmt"
	"slices"

	"evenkeel/gateway/detect"
	"evenkeel/internal/words"
)

// model writes how many requests wait in the pool of a model, and the groups of its ranks.
func (s *sheet) model(m *Model, d *Document) {
	s.lines = append(s.lines, "")
	pool := "the pool is empty"
	if m.Pool.Entries > 0 {
		pool = fmt.Sprintf("%d in the pool, the oldest for %.1f s", m.Pool.Entries, m.Pool.OldestS)
	}
	s.paragraph(0, fmt.Sprintf("model %s: %s; %d of %d places taken", m.Name, pool, d.Proxy.PlacesUsed, d.Proxy.Places))
	for i := range m.Groups {
		s.group(&m.Groups[i], &d.Traffic)
	}
}

// group writes how evenly the ranks of a group are loaded, their loads, and how ranks that prefill
// get their prompts (rounds).
func (s *sheet) group(g *Group, t *detect.Traffic) {
	s.paragraph(2, groupSummary(g, t))
	s.ranks(g)
	if g.Rounds != nil { // the ranks also prefill
		s.paragraph(indentInGroup, g.Rounds.Says)
	}
	if g.ModelWhy != "" {
		s.paragraph(indentInGroup, "There is no step model: "+withFullStop(g.ModelWhy))
	}
}

// indentInGroup is how many columns the text about a group is indented.
const indentInGroup = 4

// groupSummary says how many ranks a group has, which policy it has, and how evenly its ranks are
// loaded. A step of a group waits for its fullest rank. ModelMs is the length of a step at the
// present loads, by the step model, and LostShare the part of it that imbalance costs.
func groupSummary(g *Group, t *detect.Traffic) string {
	name := "group " + g.Name
	if g.Name == "" {
		name = "ranks without barrier"
		var groups []string
		for i := range g.Ranks {
			if group := g.Ranks[i].Group; group != "" && !slices.Contains(groups, group) {
				groups = append(groups, group)
			}
		}
		if len(groups) > 0 {
			name += " of groups " + words.FirstOf(groups)
		}
	}
	ranks := words.Count(len(g.Ranks), "rank")
	if g.SteppingRanks < len(g.Ranks) {
		ranks = fmt.Sprintf("%d of %s step", g.SteppingRanks, ranks)
	}
	text := fmt.Sprintf("%s: %s, policy %s, imbalance %s tokens, idle %.1f %%", name, ranks, g.Policy, shortCount(g.ImbalanceTokens),
		100*g.IdleShare)
	if g.ModelMs > 0 { // 0: there is no step model
		text += fmt.Sprintf(", %.1f %% of %.1f ms lost", 100*g.LostShare, g.ModelMs)
	}
	// If tokens come much more slowly than one per step, the streams do not run in common steps, and
	// the step time means little. Without samples of TPOT, common steps are assumed.
	const muchSlower = 3 // a stream that gets a token per step has a TPOT of about one step
	haveCommonSteps := t.TPOT.Samples == 0 || t.TPOT.P50Ms <= muchSlower*g.StepMs
	if g.StepMs > 0 && haveCommonSteps {
		text += fmt.Sprintf(", step %.1f ms", g.StepMs)
	}
	if g.Held > 0 { // the policy holds requests back, to send several at once
		text += fmt.Sprintf(", %d held", g.Held)
	}
	if g.FallbackRounds > 0 {
		text += "; the policy was too slow, so that another one decides"
	}
	return text
}

// ranks draws the KV tokens of each rank, writes their mean and extremes, and names the ranks that
// are not up. If no rank takes part in the steps of the group (InSteps), no load counts, and it
// writes nothing.
func (s *sheet) ranks(g *Group) {
	var fullest, emptiest *detect.Rank
	for i := range g.Ranks {
		r := &g.Ranks[i]
		if !r.InSteps {
			continue
		}
		if fullest == nil || readTokens(r) > readTokens(fullest) {
			fullest = r
		}
		if emptiest == nil || readTokens(r) < readTokens(emptiest) {
			emptiest = r
		}
	}
	if fullest == nil {
		return
	}
	if len(g.Ranks) <= ranksWithTheirBar {
		s.drawBars(g)
	} else {
		s.drawColumns(g)
	}
	s.paragraph(indentInGroup, fmt.Sprintf("KV tokens: mean %s, most %s (%s), least %s (%s)", shortCount(int64(g.MeanTokens)),
		shortCount(readTokens(fullest)), fullest.Name, shortCount(readTokens(emptiest)), emptiest.Name))
	s.nameRanksNotUp(g)
}

// nameRanksNotUp names the ranks that are not up, by their state and with its letter in the
// drawing.
func (s *sheet) nameRanksNotUp(g *Group) {
	for _, state := range []string{detect.RankDown, detect.RankOut, detect.RankDraining, detect.RankForeign, detect.RankRemoved} {
		var names []string
		for i := range g.Ranks {
			if g.Ranks[i].State == state {
				names = append(names, g.Ranks[i].Name)
			}
		}
		if len(names) > 0 {
			s.paragraph(indentInGroup, fmt.Sprintf("%c %s: %s", markOf(state), state, words.FirstOf(names)))
		}
	}
}

// readTokens is how many KV tokens a step of the rank reads: all but those of prompts that are not
// computed yet.
func readTokens(r *detect.Rank) int64 { return r.KVTokens - r.Unread }

// markOf is the letter for a rank's state in the drawings; a space: the rank is up.
func markOf(state string) rune {
	switch state {
	case detect.RankUp:
		return ' '
	case detect.RankOut:
		return 'O'
	case detect.RankDraining:
		return 'D'
	case detect.RankForeign:
		return 'F'
	case detect.RankRemoved:
		return 'R'
	}
	return 'x'
}

// drawBars draws a horizontal bar per rank, with numbers beside it. The bar of the fullest rank has
// full length. A rank that takes part in no steps has no load that counts, so its line has only its
// state.
func (s *sheet) drawBars(g *Group) {
	nameWidth := 0
	for i := range g.Ranks {
		nameWidth = max(nameWidth, columns(clean(g.Ranks[i].Name)))
	}
	nameWidth = min(nameWidth, s.width/3)
	barWidth := max(6, min(40, s.width-nameWidth-50)) // 50 columns are for the numbers beside the bar
	for i := range g.Ranks {
		r := &g.Ranks[i]
		line := fmt.Sprintf("    %s %c ", padRight(tail(r.Name, nameWidth), nameWidth), markOf(r.State))
		if !r.InSteps {
			s.row("%s%s", line, r.State)
			continue
		}
		line += fmt.Sprintf("%s %5s", bar(r, g, barWidth), shortCount(r.KVTokens))
		if r.Capacity > 0 {
			line += fmt.Sprintf(" %3.0f %%", 100*float64(r.KVTokens)/float64(r.Capacity))
		}
		line += fmt.Sprintf(" %3d/%d slots", r.Used, r.Slots)
		if r.TokenMs > 0 {
			line += fmt.Sprintf(" %.0f ms/token", r.TokenMs)
		}
		if g.Rounds != nil { // the ranks also prefill, and have prompt tokens still to compute
			line += fmt.Sprintf(" %s new", shortCount(r.Backlog))
		}
		if r.Kept > 0 { // KV of ended answers
			line += fmt.Sprintf(" %s kept", shortCount(r.Kept))
		}
		if r.Tight { // it ran out of KV memory, so it is kept emptier for a while
			line += " tight"
		}
		s.row("%s", line)
	}
}

// bar draws the load of one rank in width cells, with a | at the group's mean.
func bar(r *detect.Rank, g *Group, width int) string {
	fullLength, cells := float64(max(1, g.MostTokens)), make([]rune, width) // fullLength: tokens of a bar with full length; 1 avoids 0/0
	for i := range cells {
		cells[i] = []rune("·▏▎▍▌▋▊▉█")[eighths(float64(readTokens(r))/fullLength, width, i)]
	}
	cells[max(0, min(width-1, int(g.MeanTokens/fullLength*float64(width))))] = '|'
	return string(cells)
}

// eighths is how many eighths (0 to 8) of one cell are filled if a bar fills this share of all
// cells. It is the bar's length in eighths, rounded, less the eighths of the cells before this one.
func eighths(share float64, cells, cell int) int {
	return max(0, min(8, int(share*float64(8*cells)+0.5)-8*cell))
}

// drawColumns draws the ranks in bands, which are rows of columns: at most mostBands bands, each
// bandLines lines high.
const (
	mostBands = 8
	bandLines = 2
)

// drawColumns draws a column per rank, for groups with many ranks. The column of the fullest rank
// has full height. A rank that is not up has the letter of its state at the foot of its column. For
// ranks that prefill, a line below shows the prompt tokens that each still has to compute.
func (s *sheet) drawColumns(g *Group) {
	const labelWidth = 6 // in columns of text, on the left of each line
	ranksPerLine := s.width - labelWidth
	bands := (len(g.Ranks) + ranksPerLine - 1) / ranksPerLine // number of bands, rounded up
	perBand := (len(g.Ranks) + bands - 1) / bands             // ranks per band, rounded up
	mostBacklog := int64(1)                                   // at least 1, because backlogs are divided by it
	for i := range g.Ranks {
		mostBacklog = max(mostBacklog, g.Ranks[i].Backlog)
	}
	for band := range min(bands, mostBands) {
		ranks := g.Ranks[band*perBand : min(len(g.Ranks), (band+1)*perBand)]
		s.drawLoads(ranks, g.MostTokens)
		if g.Rounds != nil { // the ranks also prefill
			s.drawCells("new", ranks, func(r *detect.Rank) rune { // the only line: line 0 of 1
				return filled(eighths(float64(r.Backlog)/float64(mostBacklog), 1, 0))
			})
		}
	}
	if bands > mostBands {
		s.row("    %d more ranks are not drawn", len(g.Ranks)-mostBands*perBand)
	}
}

// drawLoads draws the columns of one band, in bandLines lines. A column of mostTokens has full
// height. A rank that takes part in no steps (InSteps) has no load that counts, so its column is
// empty.
func (s *sheet) drawLoads(ranks []detect.Rank, mostTokens int64) {
	fullHeight := float64(max(1, mostTokens))   // 1 or more, as loads are divided by it
	for row := bandLines - 1; row >= 0; row-- { // only the lowest and the highest row have a label
		label := map[int]string{0: "0", bandLines - 1: shortCount(mostTokens)}[row]
		s.drawCells(label, ranks, func(r *detect.Rank) rune {
			mark := markOf(r.State)
			switch {
			case row == 0 && mark != ' ': // the foot of the column of a rank that is not up
				return mark
			case !r.InSteps:
				return ' '
			}
			return filled(eighths(float64(readTokens(r))/fullHeight, bandLines, row))
		})
	}
}

// drawCells draws a line with a label and one cell per rank.
func (s *sheet) drawCells(label string, ranks []detect.Rank, cell func(*detect.Rank) rune) {
	line := make([]rune, len(ranks))
	for i := range ranks {
		line[i] = cell(&ranks[i])
	}
	s.row("%5s %s", label, string(line))
}

// filled is a cell of which n eighths (0 to 8) are filled, from below.
func filled(n int) rune { return []rune(" ▁▂▃▄▅▆▇█")[n] }
