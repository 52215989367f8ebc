package livepage

import (
	"fmt"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"evenkeel/gateway/detect"
)

// threeGroups makes the ranks of a document three groups of the same size, each on hosts of its
// own.
func threeGroups(d *detect.Facts) {
	m := &d.Models[0]
	all := m.Groups[0]
	m.Groups = nil
	for i, each := 0, len(all.Ranks)/3; i < 3; i++ {
		g := all
		g.Name = string(rune('a' + i))
		g.Ranks = append([]detect.Rank(nil), all.Ranks[i*each:(i+1)*each]...)
		g.SteppingRanks = each
		for j := range g.Ranks {
			g.Ranks[j].Name = fmt.Sprintf("10.0.3.%d:8000/%d", 10+i, j)
		}
		m.Groups = append(m.Groups, g)
	}
}

// answersOf has every rank answer ten times in each document; those of one rank of the first group
// are empty.
func answersOf(empty int) func(*detect.Facts) {
	answers := uint64(0)
	return func(d *detect.Facts) {
		answers += 10
		for _, g := range d.Models[0].Groups {
			for i := range g.Ranks {
				g.Ranks[i].Answers = answers
			}
		}
		d.Models[0].Groups[0].Ranks[empty].Empty = answers
	}
}

// Small groups stand side by side, and the numbers of the proxy stand above them.
func TestSmallGroupsStandSideBySide(t *testing.T) {
	b, s := chromium(t), newSite(t, 12)
	s.fake.Change(threeGroups)
	s.open()
	rows := `new Set([...document.querySelectorAll('#groups .group')].map((e) => e.getBoundingClientRect().top)).size`
	bottom := func(id string) string {
		return fmt.Sprintf("document.getElementById('%s').getBoundingClientRect().bottom", id)
	}
	for _, tt := range []struct{ width, rows int64 }{{1440, 1}, {1024, 2}, {390, 3}} {
		b.do(chromedp.EmulateViewport(tt.width, 900))
		b.visit(s)
		b.eventually("the pictures", "document.querySelectorAll('canvas.map').length === 3 && evenkeel.frames.length > 1")
		require.Equal(t, fmt.Sprint(tt.rows), b.eval(rows), "rows of groups at %d px", tt.width)
		require.Equal(t, "true", b.eval("[...document.querySelectorAll('canvas.map')].every((c) => c.width === c.clientWidth)"),
			"each is as wide as it was drawn")
		require.Equal(t, "true", b.eval(bottom("traffic")+" < document.getElementById('ranks').getBoundingClientRect().top"),
			"the numbers stand first")
		require.Equal(t, "true", b.eval(bottom("traffic")+" < 900"), "they are on the first screen at %d px", tt.width)
	}
	b.do(chromedp.EmulateViewport(1440, 900))
	b.eventually("all groups on the first screen", bottom("ranks")+" < 900")
	s.fake.Change(nil)
	b.eventually("one group has the whole width",
		"document.querySelectorAll('canvas.map').length === 1 && document.querySelector('canvas.map').clientWidth > 1300")
	b.calm(s)
}

// What an incident names has its mark in the picture, in words and in the tables, as long as it
// lasts.
func TestPageMarksWhatIncidentsName(t *testing.T) {
	b, s := chromium(t), newSite(t, 48)
	empty := answersOf(5)
	s.fake.Change(func(d *detect.Facts) {
		empty(d)
		e := &d.Engines[13] // its ranks are 16 to 31
		e.Hangs, e.Why = true, "it does not answer its health check (5 s)"
		p := &d.Engines[3]
		p.Why = "its clock is slow"
	})
	s.open()
	b.visit(s)
	b.eventually("the incidents", "evenkeel.document && evenkeel.document.incidents.length === 3")
	b.eventually("the marks in words, once the picture is drawn",
		"document.querySelector('canvas.map').getAttribute('aria-label').includes('Marked as wrong: Empty answers; Engine hangs.')")
	b.press("1")
	b.press(kb.Home)
	read := "document.querySelector('.read span').textContent"
	b.eventually("a rank that nothing names", read+".startsWith('10.0.3.10:8000/0 ') && !"+read+".includes('✕')")
	for range 5 {
		b.press(kb.ArrowRight)
	}
	b.eventually("the rank that is named", read+".startsWith('10.0.3.10:8000/5 ') && "+read+".includes('✕ Empty answers')")
	b.press(kb.End)
	b.press(kb.Escape)
	b.eval("(document.getElementById('rank-details').open = true, '')")
	b.eventually("the ranks in the table", "document.querySelectorAll('#rank-rows tr[data-named=bad]').length === 17")
	require.Equal(t, "✕ Engine hangs", b.eval("document.querySelector('#rank-rows tr:nth-child(17)').title"))
	require.Equal(t, "10.0.1.13:8000/0 ! Engine trouble", b.eval("[...document.querySelectorAll('#prefill-rows "+
		"tr[data-named=warn]')].map((r) => r.children[0].textContent + ' ' + r.title).join()"))
	require.Equal(t, "10.0.1.13:8000 warn,10.0.3.11:8000 bad", b.eval("[...document.querySelectorAll('#engine-rows tr')].filter((r) => "+
		"r.dataset.named).map((r) => r.children[0].textContent + ' ' + r.dataset.named).join()"), "what is named stands first")
	b.shoot("marks")
	s.fake.Change(nil)
	b.eventually("no mark is left", "document.querySelectorAll('tr[data-named=bad]').length === 0 && "+
		"!document.querySelector('canvas.map').getAttribute('aria-label').includes('wrong:')")
	b.calm(s)
}

// A model or a group that is named has its mark beside its name.
func TestPageMarksTheGroupThatIsNamed(t *testing.T) {
	b, s := chromium(t), newSite(t, 12)
	s.fake.Change(func(d *detect.Facts) {
		threeGroups(d)
		d.Models[0].Groups[1].LostShare = 0.4
	})
	s.open()
	b.visit(s)
	b.eventually("the mark", "[...document.querySelectorAll('#groups h3')].map((e) => e.textContent).join() === 'deepseek-r1 · a,deepseek-r1 "+
		"· b! Imbalance,deepseek-r1 · c'")
	b.calm(s)
}
