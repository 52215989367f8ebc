package report

import (
	"fmt"
	"html"
	"image/color"
	"regexp"
	"strings"
	"sync"
)

// Plots are drawn in colours that stand for roles; themed replaces them by
// variables of the page, which knows whether it is light or dark. A role that
// lets through what is behind it is a colour of its own, for gonum's SVG writes
// translucent colours darkened.
var (
	ink   = role(1)
	muted = role(2)
	grid  = role(3)
	veil  = role(4)
)

const (
	firstSeries  = 0x10
	firstBand    = 0x20
	seriesColors = 6 // runs that get a colour of their own (page.html)
)

func role(n int) color.RGBA { return color.RGBA{R: 1, G: 2, B: uint8(n), A: 255} }

func seriesColor(i int) color.RGBA { return role(firstSeries + i%seriesColors) }

func bandColor(i int) color.RGBA { return role(firstBand + i%seriesColors) }

// seriesVar is the colour of run i in the page's style.
func seriesVar(i int) string { return fmt.Sprintf("var(--series%d)", i%seriesColors) }

func hex(c color.RGBA) string { return fmt.Sprintf("#%02X%02X%02X", c.R, c.G, c.B) }

// Made when the first picture is: this package is also in programs that draw none.
var (
	roleColors = sync.OnceValue(func() *strings.Replacer {
		pairs := []string{hex(ink), "var(--ink)", hex(muted), "var(--muted)", hex(grid), "var(--grid)", hex(veil),
			"var(--paper);fill-opacity:0.65"}
		for i := range seriesColors {
			pairs = append(pairs, hex(seriesColor(i)), seriesVar(i), hex(bandColor(i)), seriesVar(i)+";fill-opacity:0.28")
		}
		return strings.NewReplacer(pairs...)
	})
	svgHead   = lazily(`(?s)^.*?<svg [^>]*?viewBox="([^"]*)"[^>]*>`)
	fontStyle = lazily(`font-family:[^;"]*;(?:font-(?:variant|weight|style):[^;"]*;)*`)
)

func lazily(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}

// themed makes a file of SVG a part of a page: as wide as there is room, in the
// page's colours and font, with words for those who cannot see it.
func themed(svg, what string) string {
	svg = svgHead().ReplaceAllStringFunc(svg, func(head string) string {
		box := svgHead().FindStringSubmatch(head)[1]
		title := html.EscapeString(what)
		return `<svg viewBox="` + box + `" role="img" aria-label="` + title + `"><title>` + title + `</title>`
	})
	svg = fontStyle().ReplaceAllString(svg, "")
	return strings.TrimSpace(roleColors().Replace(svg))
}
