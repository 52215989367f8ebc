package report

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The colours of figures that are files of their own: those of the reports on white.
var (
	Ink    = color.RGBA{R: 0x1f, G: 0x23, B: 0x28, A: 0xff}
	Muted  = color.RGBA{R: 0x5f, G: 0x68, B: 0x72, A: 0xff}
	Blue   = color.RGBA{R: 0x1f, G: 0x6f, B: 0xb4, A: 0xff}
	Green  = color.RGBA{R: 0x2d, G: 0x94, B: 0x5b, A: 0xff}
	Purple = color.RGBA{R: 0x8a, G: 0x3f, B: 0xb0, A: 0xff}
	Ochre  = color.RGBA{R: 0xc2, G: 0x7c, B: 0x0e, A: 0xff}
	Grey   = color.RGBA{R: 0x8c, G: 0x95, B: 0x9f, A: 0xff}

	gridOnWhite = color.RGBA{R: 0xe3, G: 0xe6, B: 0xea, A: 0xff}
)

// NewFigure is an empty figure, with a grid across it and, if wanted, upright.
func NewFigure(x, y string, upright bool) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.White
	p.X.Label.Text, p.Y.Label.Text = x, y
	lines := plotter.NewGrid()
	lines.Horizontal = StyleAxes(p, gridOnWhite, Muted)
	lines.Vertical = lines.Horizontal
	if !upright {
		lines.Vertical.Color = nil
	}
	p.Add(lines)
	StyleText(&p.Legend.TextStyle, 10, Muted)
	p.Legend.Padding, p.Legend.YOffs = 3, 6 // off the axis, and each line off the next
	return p
}

// AddLine draws a line with its name in the legend.
func AddLine(p *plot.Plot, name string, c color.Color, points plotter.XYs) {
	line := &plotter.Line{XYs: points, LineStyle: draw.LineStyle{Color: c, Width: 1.8}}
	p.Add(line)
	p.Legend.Add(name, line)
}

// SVG draws a figure of that many points.
func SVG(p *plot.Plot, width, height vg.Length) ([]byte, error) {
	canvas := vgsvg.New(width, height)
	p.Draw(draw.Crop(draw.New(canvas), 8, -12, 8, -8))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, fmt.Errorf("drawing a figure: %w", err)
	}
	dark := fmt.Sprintf(`path[style*="fill:#FFFFFF"]{fill:#0d1117!important}text{fill:#c9d1d9!important}path[style*="stroke:%s"]{stroke:#30363d!important}`, hex(gridOnWhite))
	return []byte(onDark(b.String(), dark)), nil
}

// onDark has a picture that is a file of its own be dark where its reader's screen is.
func onDark(svg, style string) string {
	head, rest, found := strings.Cut(svg, "<svg")
	if !found { // there is no picture
		return svg
	}
	open, body, _ := strings.Cut(rest, ">")
	return head + "<svg" + open + "><style>@media (prefers-color-scheme:dark){" + style + "}</style>" + body
}

// Replace writes a file so that whoever reads it, as serve does when it changes, sees
// the old one or the new one.
func Replace(path string, data []byte) error {
	temp := fmt.Sprintf("%s.%d.tmp", path, os.Getpid())
	err := os.WriteFile(temp, data, 0o644)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = os.Remove(temp) // where there is one; err says the rest
	}
	return err
}
