package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/lipgloss"
	"github.com/charmbracelet/x/ansi"

	"evenkeel/gateway/live"
)

// Pages of the screen.
const (
	pageOverview = iota
	pageRanks
	pagePrefill
	pageDecisions
	pageHelp
	pages
)

// screen is what the terminal shows.
type screen struct {
	url           string
	width, height int
	doc           *live.Document
	at            time.Time // of doc, by our clock
	now           time.Time
	err           error // of the stream; nil while it runs
	page          int
	scroll        int
	byLoad        bool
	paused        bool
}

// Colours are those of Okabe and Ito, told apart without seeing red or green;
// nothing is said by colour alone.
var (
	strong = lipgloss.NewStyle().Bold(true)
	faint  = lipgloss.NewStyle().Faint(true)
	good   = lipgloss.NewStyle().Foreground(lipgloss.AdaptiveColor{Light: "#00694f", Dark: "#2fc79a"})
	bad    = lipgloss.NewStyle().Bold(true).Foreground(lipgloss.AdaptiveColor{Light: "#b34700", Dark: "#f0883e"})
	filled = lipgloss.NewStyle().Foreground(lipgloss.AdaptiveColor{Light: "#0072b2", Dark: "#56b4e9"})
)

// Once prints a document as the overview, for scripts and pipes.
func Once(d *live.Document, width int) string {
	s := screen{width: width, height: 1 << 20, doc: d, at: time.UnixMilli(d.AtMs), now: time.UnixMilli(d.AtMs)}
	return strings.Join(append(s.head(), s.body()...), "\n") + "\n"
}

// View implements tea.Model.
func (s screen) View() string {
	lines := s.head()
	body := s.body()
	from := max(0, min(s.scroll, len(body)-s.room()))
	to := min(len(body), from+s.room())
	lines = append(lines, body[from:to]...)
	for len(lines) < s.height-1 {
		lines = append(lines, "")
	}
	foot := "1 overview  2 ranks  3 prefill  4 decisions   s order  p pause  ? help  q quit"
	if more := len(body) - to; more > 0 || from > 0 {
		foot = fmt.Sprintf("%d-%d of %d  ", from+1, to, len(body)) + foot
	}
	return strings.Join(append(lines[:max(0, min(len(lines), s.height-1))], s.fit(faint.Render(foot))), "\n")
}

// room is how many lines of the body are seen.
func (s screen) room() int { return max(1, s.height-len(s.head())-1) }

func (s screen) fit(line string) string { return ansi.Truncate(line, s.width, "…") }

// head says whether what is seen is fresh, and whether something is wrong.
func (s screen) head() []string {
	if s.doc == nil {
		return s.fitAll([]string{strong.Render("evenkeel top") + "  " + s.url, s.trouble(), ""})
	}
	d, p := s.doc, s.doc.Proxy
	state := good.Render("ready")
	switch {
	case p.Draining:
		state = bad.Render("draining")
	case !p.Ready:
		state = bad.Render("NOT READY: " + p.Why)
	}
	lines := []string{
		fmt.Sprintf("%s %s  up %s  %s  %s  %s", strong.Render(p.ID), p.Version, span(p.UptimeS), state, time.UnixMilli(d.AtMs).Format("15:04:05"), s.trouble()),
		fmt.Sprintf("%.1f req/s %s fail/s %s tok/s %s open  TTFT %s TPOT %s ms", d.Traffic.RequestsPerS, warn(fmt.Sprintf("%.1f", d.Traffic.FailuresPerS), d.Traffic.FailuresPerS > 0 && !d.Traffic.Recovered),
			count(int64(d.Traffic.TokensPerS)), count(p.Open), latency(d.Traffic.TTFT), latency(d.Traffic.TPOT)),
	}
	lasting, over := s.incidents()
	most := max(1, min(6, s.height/4))
	if most == 1 && len(lasting) > 1 {
		more := fmt.Sprintf(" (+%d)", len(lasting)-1)
		lasting = []string{ansi.Truncate(lasting[0], max(0, s.width-len(more)), "…") + bad.Render(more)}
	}
	for i, line := range lasting {
		if i == most-1 && len(lasting) > most {
			lines = append(lines, bad.Render(fmt.Sprintf("! %d more", len(lasting)-i)))
			break
		}
		lines = append(lines, strings.Split(line, "\n")...)
	}
	if len(lasting) == 0 {
		lines = append(lines, good.Render("✓ nothing is wrong that can be seen from here"))
	}
	if s.height > 20 {
		lines = append(lines, over[:min(3, len(over))]...)
	}
	return s.fitAll(append(lines, ""))
}

// trouble is what there is to say of the stream itself.
func (s screen) trouble() string {
	switch {
	case s.doc == nil && s.err == nil:
		return faint.Render("asking …")
	case s.doc == nil:
		return bad.Render(clean(s.err.Error()))
	case s.paused:
		return bad.Render("PAUSED")
	case s.err != nil || s.now.Sub(s.at) > 3*time.Duration(s.doc.EveryMs)*time.Millisecond:
		why := ""
		if s.err != nil {
			why = ": " + clean(s.err.Error())
		}
		return bad.Render(fmt.Sprintf("LOST, %s old%s", span(s.now.Sub(s.at).Seconds()), why))
	}
	return ""
}

func (s screen) body() (lines []string) {
	switch {
	case s.page == pageHelp:
		lines = help
	case s.doc == nil:
	case s.page == pageRanks:
		lines = s.ranks()
	case s.page == pagePrefill:
		lines = append(s.prefill(), s.engines(false)...)
	case s.page == pageDecisions:
		lines = s.decisions()
	default:
		lines = s.overview()
	}
	return s.fitAll(lines)
}

func (s screen) fitAll(lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = s.fit(l)
	}
	return out
}

var help = []string{
	"1 2 3 4  tab  ←  →   the pages: overview, ranks, prefill, decisions",
	"j k  ↓ ↑  space  b   scroll; g first, G last",
	"s                    ranks by load or by name",
	"p                    pause and go on",
	"?  esc               this, and back",
	"q                    quit",
	"",
	"KV bars are of a rank's capacity, or of the fullest rank where it is not known.",
	"imbalance: sum over ranks of the fullest rank's KV tokens less their own;",
	"idle: that as a share, which every step of the group waits for.",
	"lost: the share of a step that imbalance costs, by the step model.",
	"step: what a step takes, measured. There is none where a token takes more than",
	"three times as long: such streams did not come in common steps.",
	"Ranks whose engine is down do not count in these.",
	"against a policy: the last minutes replayed under it, with the same requests.",
	"A rank's line: state, KV bar, KV tokens, share of the whole bar, slots used/all,",
	"and new: prompt tokens that it has to compute, where ranks prefill and decode.",
	"TTFT and TPOT: p50/p99 of the last minute.",
	"The picture has a column for each rank, by host, up to the line at the fullest,",
	"which every step waits for: ░ is what is lost to that. A rank that drains is",
	"meant to be empty: it has · there. x is down, D drains, O is out. The row new is",
	"the same as a rank's new, of the most that a rank has.",
}

// overview is one line or two for everything.
func (s screen) overview() (lines []string) {
	d := s.doc
	for _, m := range d.Models {
		lines = append(lines, strong.Render(m.Name)+"   "+pool(m.Pool, d.Proxy))
		for _, g := range m.Groups {
			lines = append(lines, group(g, d.Traffic))
			lines = append(lines, s.picture(g)...)
			if strings.HasSuffix(g.ModelWhy, "?") { // else it is learned soon
				lines = append(lines, s.wrapped(lipgloss.NewStyle(), "There is no step model: "+g.ModelWhy)...)
			}
			if g.Rounds != nil {
				lines = append(lines, s.wrapped(lipgloss.NewStyle(), g.Rounds.Says)...)
			}
			lines = append(lines, gone(g, d.Engines)...)
			lines = append(lines, s.twin(g.Twin)...)
		}
		lines = append(lines, "")
	}
	lines = append(lines, s.failures()...)
	for _, a := range d.Advice {
		lines = append(lines, strong.Render("advice")+"  "+a.Model+": "+advised(a, d.Incidents))
	}
	lines = append(lines, s.prefill()...)
	lines = append(lines, s.engines(true)...)
	if d.Geo != nil {
		for _, p := range d.Geo.Peers {
			state := good.Render("up")
			if !p.Up {
				state = bad.Render("down " + p.Fault)
			}
			lines = append(lines, fmt.Sprintf("peer %s in %s  %s  rtt %.1f ms  %d in flight", p.ID, p.Region, state, p.RTTMs, p.InFlight))
		}
	}
	for _, a := range d.Scopes {
		lines = append(lines, fmt.Sprintf("%s  %s  owner %s  epoch %d", cmp.Or(a.Group, a.Region), a.Phase, cmp.Or(a.Holder, "nobody"), a.Epoch))
	}
	lines = append(lines, "")
	return append(lines, s.decisions()...)
}

// advised is what an advice says, which is of the last minute: it does not say that there are enough ranks while many requests wait.
func advised(a live.Advice, incidents []live.Incident) string {
	waits := slices.ContainsFunc(incidents, func(in live.Incident) bool { return in.UntilMs == 0 && in.Crowded })
	if waits && len(a.Steps) > 0 && a.Steps[0].Reason == "balanced" {
		return "not known: many requests wait now, though the ranks were not too busy in the mean of the last minute"
	}
	return a.Says
}

func group(g live.Group, t live.Traffic) string {
	name := cmp.Or(g.Name, "no barrier")
	ranks := fmt.Sprintf("%d ranks", len(g.Ranks))
	if g.SteppingRanks < len(g.Ranks) {
		ranks = fmt.Sprintf("%d of %d ranks", g.SteppingRanks, len(g.Ranks))
	}
	text := fmt.Sprintf("  %s  %s  %s  imbalance %s  idle %.1f%%", strong.Render(name), ranks, g.Policy, count(g.ImbalanceTokens), 100*g.IdleShare)
	if g.ModelMs > 0 {
		text += fmt.Sprintf("  %.1f%% of %.1f ms lost", 100*g.LostShare, g.ModelMs)
	}
	if g.StepMs > 0 && (t.TPOT.Samples == 0 || t.TPOT.P50Ms <= 3*g.StepMs) { // else the streams did not come in common steps
		text += fmt.Sprintf("  step %.1f ms", g.StepMs)
	}
	if g.Held > 0 {
		text += fmt.Sprintf("  %d held", g.Held)
	}
	if g.FallbackRounds > 0 {
		text += bad.Render("  policy too slow, another decides")
	}
	return text
}

// twin is what the last minutes would have been under other policies, in whole lines: the end of a sentence counts.
func (s screen) twin(t live.Twin) (lines []string) {
	for _, says := range t.Says {
		lines = append(lines, s.wrapped(lipgloss.NewStyle(), says)...)
	}
	if t.Note != "" {
		lines = append(lines, s.wrapped(faint, t.Note)...)
	}
	return lines
}

// wrapped is a sentence in as many lines as it needs.
func (s screen) wrapped(style lipgloss.Style, text string) (lines []string) {
	for i, l := range strings.Split(ansi.Wrap(text, max(20, s.width-4), ""), "\n") {
		lines = append(lines, "  "+strings.Repeat("  ", min(i, 1))+style.Render(l))
	}
	return lines
}

func pool(p live.Pool, proxy live.Proxy) string {
	return fmt.Sprintf("pool %d of %d, oldest %.1f s  %s", p.Entries, proxy.Places, p.OldestS, blocks(p.Ages, slices.Max(append([]int{1}, p.Ages...))))
}

func blocks(list []int, most int) string {
	var b strings.Builder
	for _, n := range list {
		b.WriteString(block(float64(n) / float64(most)))
	}
	return filled.Render(b.String())
}

func block(share float64) string {
	const steps = "▁▂▃▄▅▆▇█"
	if share <= 0 {
		return "·"
	}
	return string([]rune(steps)[min(7, int(share*8))])
}

// ranks is a line a rank.
func (s screen) ranks() (lines []string) {
	for _, m := range s.doc.Models {
		for _, g := range m.Groups {
			lines = append(lines, m.Name+group(g, s.doc.Traffic))
			list := slices.Clone(g.Ranks)
			if s.byLoad {
				slices.SortStableFunc(list, func(a, b live.Rank) int { return cmp.Compare(b.KVTokens, a.KVTokens) })
			}
			name := 0
			for _, r := range list {
				name = max(name, ansi.StringWidth(r.Name))
			}
			name = min(name, max(12, s.width/2-6))
			wide := max(4, s.width-name-45)
			if g.Rounds != nil {
				wide = max(4, wide-11)
			}
			for _, r := range list {
				of := cmp.Or(r.Capacity, g.MostTokens, 1)
				state := r.State
				switch {
				case state != live.RankUp:
					state = bad.Render(state)
				case r.Tight:
					state = bad.Render("tight")
				}
				compute, pace := "", "-"
				if r.TokenMs > 0 {
					pace = fmt.Sprintf("%.0f ms", r.TokenMs)
				}
				if g.Rounds != nil {
					compute = fmt.Sprintf(" %5s new", count(r.Backlog))
				}
				lines = append(lines, fmt.Sprintf("  %s %s %s %6s %3.0f%% %4d/%d %7s%s",
					padded(tail(r.Name, name), name), padded(state, 8), bar(float64(r.KVTokens)/float64(of), wide),
					count(r.KVTokens), 100*float64(r.KVTokens)/float64(of), r.Used, r.Slots, pace, compute))
			}
			lines = append(lines, "")
		}
	}
	return lines
}

// prefill is a line a prefill engine.
func (s screen) prefill() []string {
	p := s.doc.Prefill
	waiting := warn(count(int64(p.Waiting)), p.QueueMax > 0 && p.Waiting > p.QueueMax/2)
	if len(p.Engines) == 0 && len(p.Groups) > 0 { // the ranks above prefill, too
		return []string{fmt.Sprintf("%s  %s waiting of %d%s", strong.Render("arrival queue"), waiting, p.QueueMax, batch(p.Batch)), ""}
	}
	lines := []string{fmt.Sprintf("%s %s  %s waiting of %d  hits %.0f%% of prompt tokens%s", strong.Render("prefill"), p.Policy, waiting, p.QueueMax, 100*p.HitShare, batch(p.Batch))}
	for _, e := range p.Engines {
		lines = append(lines, fmt.Sprintf("  %-22s %s %s %3.0f%% of %.0f%% KV  %d probes, %s new  hit %.0f%%",
			tail(e.ID, 22), padded(warn(e.State, e.State != "open"), 7), bar(e.KVShare, 6), 100*e.KVShare, 100*e.GateShare, e.Inflight, count(e.NewTokens), 100*e.HitShare))
	}
	return append(lines, "")
}

// batch is what requests got that take only what others leave; empty where there are none.
func batch(b live.BatchStatus) string {
	if b.Waiting == 0 && b.Ran == 0 {
		return ""
	}
	text := fmt.Sprintf("  batch: %s wait, %s ran", count(int64(b.Waiting)), count(int64(b.Ran)))
	if b.Ran > 0 {
		text += ", held back for " + span(b.HeldS/float64(b.Ran)) + " on average"
	}
	return text
}

// engines is a line an engine, or only the first ones with something amiss: incidents
// tell of all of them.
func (s screen) engines(amiss bool) (lines []string) {
	const most = 4
	more := 0
	for _, e := range s.doc.Engines {
		fine := e.State == "up" && !e.Draining && e.Why == ""
		if amiss && fine {
			continue
		}
		if amiss && len(lines) == most {
			more++
			continue
		}
		state := e.State
		if e.Draining {
			state += ", draining"
		}
		lines = append(lines, fmt.Sprintf("  %-10s %-24s %s %s  %s", e.Role, tail(e.ID, 24), warn(state, !fine), span(e.SinceS), e.Why))
	}
	if more > 0 {
		lines = append(lines, faint.Render(fmt.Sprintf("  %d more on page 3", more)))
	}
	return lines
}

// decisions are the last ones, latest first.
func (s screen) decisions() []string {
	lines := []string{strong.Render("last decisions")}
	alone := map[string]string{} // prefill engines of one rank, which has the engine's name, as in incidents
	for _, e := range s.doc.Engines {
		if e.Role == "prefill" && e.Ranks == 1 {
			alone[e.ID+"/0"] = e.ID
		}
	}
	for _, d := range s.doc.Decisions {
		lines = append(lines, fmt.Sprintf("  %s %7s tok  %s → %s%s  %s  %s", time.UnixMilli(d.AtMs).Format("15:04:05"), count(int64(d.Prompt)),
			cmp.Or(alone[d.Prefill], d.Prefill, "–"), cmp.Or(d.Rank, "–"), waited(d), cmp.Or(d.Outcome, "runs"), faint.Render(d.Why)))
	}
	return lines
}

// waited is how long a request was in the pool, or has been so far; empty while
// it has not come there.
func waited(d live.Decision) string {
	switch {
	case d.Rank != "":
		return "  waited " + span(d.WaitMs/1000)
	case d.WaitMs > 0 && d.Outcome == "":
		return "  has waited " + span(d.WaitMs/1000)
	}
	return ""
}

// bar is a share of a width, in eighths of a cell.
func bar(share float64, width int) string {
	eighths := int(min(1, max(0, share))*float64(8*width) + 0.5)
	text := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		text += string([]rune(" ▏▎▍▌▋▊▉")[rest])
	}
	return filled.Render(text) + faint.Render(strings.Repeat("·", width-len([]rune(text))))
}

func warn(text string, is bool) string {
	if is {
		return bad.Render(text)
	}
	return text
}

func padded(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-ansi.StringWidth(text)))
}

func latency(l live.Latency) string {
	if l.Samples == 0 {
		return "–"
	}
	return fmt.Sprintf("%s/%s", short(l.P50Ms), short(l.P99Ms))
}

func short(ms float64) string {
	if ms < 100 {
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

// count shortens a number to five letters.
func count(n int64) string {
	switch {
	case n >= 10_000_000:
		return fmt.Sprintf("%dM", n/1_000_000)
	case n >= 1_000_000:
		return fmt.Sprintf("%.1fM", float64(n)/1e6)
	case n >= 10_000:
		return fmt.Sprintf("%dk", n/1000)
	}
	return fmt.Sprint(n)
}

// span shortens a time.
func span(seconds float64) string {
	switch {
	case seconds < 1:
		return fmt.Sprintf("%.0fms", 1000*seconds)
	case seconds < 120:
		return fmt.Sprintf("%.0fs", seconds)
	case seconds < 2*3600:
		return fmt.Sprintf("%.0fm", seconds/60)
	case seconds < 48*3600:
		return fmt.Sprintf("%.0fh", seconds/3600)
	}
	return fmt.Sprintf("%.0fd", seconds/86400)
}

// tail keeps the end of a name, where names of engines differ.
func tail(name string, width int) string {
	if n := ansi.StringWidth(name); n > width {
		return ansi.TruncateLeft(name, n-width+1, "…")
	}
	return name
}
