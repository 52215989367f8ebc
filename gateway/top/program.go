package top

import (
	"context"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"evenkeel/gateway/live"
)

// Run shows a proxy until somebody presses q, and asks anew whenever the stream
// is lost.
func Run(ctx context.Context, s *Source, opts ...tea.ProgramOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := tea.NewProgram(screen{url: s.URL, width: 80, height: 24}, append([]tea.ProgramOption{tea.WithAltScreen(), tea.WithContext(ctx)}, opts...)...)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			err := s.Watch(ctx, func(d *live.Document) { p.Send(seen{d, time.Now()}) })
			p.Send(lost{err})
			select {
			case <-time.After(again):
			case <-ctx.Done():
			}
		}
	}()
	_, err := p.Run()
	cancel()
	<-done
	return err
}

// What happens to the screen.
type (
	seen struct {
		*live.Document
		at time.Time
	}
	lost struct{ err error }
	tick time.Time
)

// Init implements tea.Model.
func (s screen) Init() tea.Cmd { return clock() }

func clock() tea.Cmd { return tea.Tick(time.Second, func(t time.Time) tea.Msg { return tick(t) }) }

// Update implements tea.Model.
func (s screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case tick:
		s.now = time.Time(msg)
		return s, clock()
	case seen:
		s.err = nil
		if !s.paused {
			s.doc, s.at, s.now = msg.Document, msg.at, msg.at
		}
	case lost:
		s.err = msg.err
	case tea.KeyMsg:
		return s.key(msg.String())
	}
	return s, nil
}

func (s screen) key(key string) (tea.Model, tea.Cmd) {
	turn := func(to int) { s.page, s.scroll = (to+pages)%pages, 0 }
	switch key {
	case "q", "ctrl+c":
		return s, tea.Quit
	case "1", "2", "3", "4":
		turn(int(key[0] - '1'))
	case "?", "h":
		turn(pageHelp)
	case "esc":
		turn(pageOverview)
	case "tab", "right", "l":
		turn(s.page + 1)
	case "shift+tab", "left":
		turn(s.page - 1)
	case "down", "j":
		s.scroll++
	case "up", "k":
		s.scroll--
	case "pgdown", " ":
		s.scroll += s.room()
	case "pgup", "b":
		s.scroll -= s.room()
	case "g", "home":
		s.scroll = 0
	case "G", "end":
		s.scroll = len(s.body())
	case "s":
		s.byLoad = !s.byLoad
	case "p":
		s.paused = !s.paused
	}
	s.scroll = max(0, min(s.scroll, len(s.body())-s.room()))
	return s, nil
}
